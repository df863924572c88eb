/* where.h: the address of the tests' servers: the loopback, or SUITE_ADDRESS for devices that cannot be reached over the
 * loopback. */
#ifndef SUITE_WHERE_H
#define SUITE_WHERE_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>

static inline const char *where(void)
{
    const char *address = getenv("SUITE_ADDRESS");
    return address != NULL ? address : "127.0.0.1";
}

static inline struct sockaddr_in where_address(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    inet_pton(AF_INET, where(), &address.sin_addr);
    return address;
}

#endif

/* headers.cpp: see headers.c. */
#include <rpcrdma.h>

int main()
{
    return 0;
}

/* headers.c: the library's header alone, as C; headers.cpp is the same as C++. Compiling them is the test. */
#include <rpcrdma.h>

int main(void)
{
    return 0;
}

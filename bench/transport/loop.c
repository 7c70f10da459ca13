/* What the kernel allows: two processes, blocking sockets, a header and a block per message, nothing else.
 *
 *   loop CONNECTIONS BLOCK_KIB TOTAL_MIB
 *
 * Prints JSON: gbytes_per_s, cpu_s_per_gb (both ends, user and system). Blocks go into the receiver's pool, which is
 * compared with the sender's after the clock has stopped.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { POOL = 128 << 20, MAX_CONNECTIONS = 16 };

struct header {
    uint64_t offset, length;
};

static char *source, *destination;
static size_t block, blocks, next_block;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu_s(int who) {
    struct rusage used;
    getrusage(who, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

static char *pool(void) {
    char *memory = mmap(NULL, POOL, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    return memory;
}

static int receive_all(int sock, void *to, size_t length) {
    for (size_t have = 0; have < length;) {
        ssize_t more = recv(sock, (char *)to + have, length - have, 0);
        if (more < 0) fail("recv");
        if (more == 0) return 0;
        have += (size_t)more;
    }
    return 1;
}

static void *receive_blocks(void *argument) {
    int sock = *(int *)argument;
    struct header header;
    while (receive_all(sock, &header, sizeof header))
        if (!receive_all(sock, destination + header.offset, header.length)) break;
    return NULL;
}

static void send_block(int sock, size_t number) {
    struct header header = {number * block % POOL, block};
    struct iovec parts[] = {{&header, sizeof header}, {source + header.offset, block}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t sent = sendmsg(sock, &message, 0);
    if (sent < (ssize_t)sizeof header) fail("sendmsg");
    for (size_t done = (size_t)sent - sizeof header; done < block; done += (size_t)sent)
        if ((sent = send(sock, source + header.offset + done, block - done, 0)) < 0) fail("send");
}

static void *send_blocks(void *argument) {
    int sock = *(int *)argument;
    size_t number;
    while ((number = __atomic_fetch_add(&next_block, 1, __ATOMIC_RELAXED)) < blocks) send_block(sock, number);
    shutdown(sock, SHUT_WR);
    return NULL;
}

static void on_each(int *socks, int count, void *(*work)(void *)) {
    pthread_t threads[MAX_CONNECTIONS];
    for (int i = 0; i < count; i++) pthread_create(&threads[i], NULL, work, &socks[i]);
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
}

int main(int count, char **argument) {
    int connections = count == 4 ? atoi(argument[1]) : 0, socks[MAX_CONNECTIONS];
    if (connections < 1 || connections > MAX_CONNECTIONS) return 2;
    block = (size_t)atol(argument[2]) << 10;
    blocks = ((size_t)atol(argument[3]) << 20) / block;
    source = pool();
    destination = pool();
    for (size_t i = 0; i < POOL / sizeof(uint32_t); i++) ((uint32_t *)source)[i] = (uint32_t)i * 2654435761u;

    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int door = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(door, (void *)&address, length) || listen(door, connections)) fail("listen");
    getsockname(door, (void *)&address, &length);
    pid_t receiver = fork();
    if (receiver == 0) {
        memset(destination, 0, POOL);
        for (int i = 0; i < connections; i++)
            if ((socks[i] = accept(door, NULL, NULL)) < 0) fail("accept");
        on_each(socks, connections, receive_blocks);
        _exit(0);
    }
    for (int i = 0; i < connections; i++) {
        socks[i] = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(socks[i], (void *)&address, length)) fail("connect");
    }
    usleep(150000); /* the receiver has touched its pool */
    double began_cpu = cpu_s(RUSAGE_SELF), began = now_s();
    on_each(socks, connections, send_blocks);
    if (wait(NULL) != receiver) fail("wait");
    double seconds = now_s() - began, gbytes = blocks * block / 1e9;
    double cpu = cpu_s(RUSAGE_SELF) - began_cpu + cpu_s(RUSAGE_CHILDREN);
    size_t sent = blocks * block < POOL ? blocks * block : POOL;
    if (memcmp(source, destination, sent)) {
        fprintf(stderr, "arrived damaged\n");
        return 1;
    }
    printf("{\"gbytes_per_s\": %f, \"cpu_s_per_gb\": %f}\n", gbytes / seconds, cpu / gbytes);
    return 0;
}

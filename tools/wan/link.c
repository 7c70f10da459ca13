/* A wide-area line between two network namespaces, in user space: for kernels without netem, and for tests.
 *
 *   link run MBIT ONE_WAY_US LOSS_PPM QUEUE_MS SEED    make both namespaces and be the line between them
 *   link enter NAMESPACE COMMAND...                    run a command within a namespace
 *
 * Each direction is a drop-tail queue of QUEUE_MS, then serialisation at MBIT (an Ethernet frame's overhead counted for
 * each segment), then a fixed delay; each segment is lost with the same chance. TCP super-packets stay whole unless a
 * segment of theirs is dropped, which is why a gigabit costs a fraction of a core.
 *
 * The namespaces have no name. They are descriptors of this process, printed as "ready FD FD": others enter them through
 * /proc/PID/fd/FD. When this process and all that run within are gone, so are they. It ends when its standard input
 * closes or its parent dies, whatever the parent died of.
 *
 * Commands, one a line on standard input, each answered by a line: rate MBIT | delay US | loss PPM | queue MS | cut |
 * heal | stats. A change counts for what enters the line after it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <math.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum {
    FRAME_OVERHEAD = 38, /* preamble, Ethernet header, checksum and gap */
    MAX_PACKET = 66000,
    BATCH = 32, /* packets taken from one side before the other has its turn */
    LONGEST_WAIT_NS = 50000000,
    QUEUE_PACKETS = 20000, /* of the kernel in front of us: never the bottleneck */
    FIN = 0x01, PSH = 0x08, CWR = 0x80,
    OFFLOAD = sizeof(struct virtio_net_hdr),
};

struct line {
    double ns_per_byte, loss;
    int64_t delay_ns, queue_ns;
    bool cut;
};

struct packet {
    struct packet *next;
    int64_t due;
    size_t length;
    unsigned char data[]; /* struct virtio_net_hdr, then the IP packet */
};

/* How a packet falls into segments. */
struct shape {
    int segments;
    size_t ip_header, headers, segment, payload; /* `headers`: IP and TCP */
};

struct direction {
    int from, to;
    struct packet *first, *last;
    double idle_at;      /* when all that was let in will have been put on the wire */
    int64_t until_loss;  /* segments that pass before the next lost one */
    uint64_t bytes, segments, lost, overflowed, cut;
};

static struct line line;
static unsigned short chance[3];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* ---- namespaces ---- */

static void configure(int control, struct ifreq *request, unsigned long what, const char *name) {
    if (ioctl(control, what, request) < 0) fail(name);
}

static void bring_up(int control, const char *interface) {
    struct ifreq request = {0};
    strcpy(request.ifr_name, interface);
    configure(control, &request, SIOCGIFFLAGS, "interface flags");
    request.ifr_flags |= IFF_UP;
    configure(control, &request, SIOCSIFFLAGS, "interface up");
}

static void set_address(int control, const char *interface, unsigned long what, const char *address) {
    struct ifreq request = {0};
    struct sockaddr_in *in = (struct sockaddr_in *)&request.ifr_addr;
    strcpy(request.ifr_name, interface);
    in->sin_family = AF_INET;
    inet_pton(AF_INET, address, &in->sin_addr);
    configure(control, &request, what, "interface address");
}

static void no_ipv6(void) {
    int file = open("/proc/sys/net/ipv6/conf/all/disable_ipv6", O_WRONLY);
    if (file < 0) return; /* a kernel without it */
    if (write(file, "1", 1) != 1) perror("disable_ipv6");
    close(file);
}

/* Moves this process into a new namespace with a loopback and the end of a line; returns the namespace. */
static int new_namespace(const char *address, int *tun) {
    if (unshare(CLONE_NEWNET) < 0) fail("new network namespace");
    no_ipv6();
    int control = socket(AF_INET, SOCK_DGRAM, 0);
    bring_up(control, "lo");
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    strcpy(request.ifr_name, "wan0");
    *tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (*tun < 0 || ioctl(*tun, TUNSETIFF, &request) < 0) fail("/dev/net/tun");
    if (ioctl(*tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) < 0) fail("TUN offload");
    set_address(control, "wan0", SIOCSIFADDR, address);
    set_address(control, "wan0", SIOCSIFNETMASK, "255.255.255.0");
    request.ifr_qlen = QUEUE_PACKETS;
    configure(control, &request, SIOCSIFTXQLEN, "queue length");
    bring_up(control, "wan0");
    close(control);
    int namespace = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (namespace < 0) fail("/proc/self/ns/net");
    return namespace;
}

/* ---- packets ---- */

static struct packet *new_packet(size_t length) {
    struct packet *packet = malloc(sizeof *packet + length);
    if (!packet) fail("memory");
    packet->next = NULL;
    packet->length = length;
    return packet;
}

static struct shape shape_of(const unsigned char *data, size_t length) {
    const struct virtio_net_hdr *offload = (const void *)data;
    struct shape shape = {.segments = 1, .payload = length - OFFLOAD};
    if (offload->gso_type == VIRTIO_NET_HDR_GSO_NONE || !offload->gso_size) return shape;
    const unsigned char *ip = data + OFFLOAD;
    shape.ip_header = (ip[0] & 15) * 4;
    shape.headers = shape.ip_header + (ip[shape.ip_header + 12] >> 4) * 4;
    shape.segment = offload->gso_size;
    shape.payload = length - OFFLOAD - shape.headers;
    shape.segments = (int)((shape.payload + shape.segment - 1) / shape.segment);
    if (shape.segments < 1) shape.segments = 1;
    return shape;
}

static uint32_t sum16(const unsigned char *data, size_t length, uint32_t sum) {
    for (size_t i = 0; i + 1 < length; i += 2) sum += data[i] << 8 | data[i + 1];
    return sum;
}

static uint16_t fold(uint32_t sum) {
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)sum;
}

static void put16(unsigned char *at, uint16_t value) {
    at[0] = value >> 8;
    at[1] = value & 0xff;
}

/* The segments [first, stop) of a super-packet as a packet of their own. */
static struct packet *slice(const unsigned char *data, const struct shape *shape, int first, int stop) {
    size_t begin = first * shape->segment, end = stop * shape->segment;
    if (end > shape->payload) end = shape->payload;
    size_t total = shape->headers + end - begin;
    struct packet *part = new_packet(OFFLOAD + total);
    memcpy(part->data, data, OFFLOAD + shape->headers);
    memcpy(part->data + OFFLOAD + shape->headers, data + OFFLOAD + shape->headers + begin, end - begin);

    struct virtio_net_hdr *offload = (void *)part->data;
    if (stop - first == 1) offload->gso_type = offload->gso_size = 0;
    unsigned char *ip = part->data + OFFLOAD, *tcp = ip + shape->ip_header;
    put16(ip + 2, (uint16_t)total);
    put16(ip + 4, (uint16_t)((ip[4] << 8 | ip[5]) + first));
    put16(ip + 10, 0);
    put16(ip + 10, (uint16_t)~fold(sum16(ip, shape->ip_header, 0)));

    uint32_t sequence;
    memcpy(&sequence, tcp + 4, sizeof sequence);
    sequence = htonl(ntohl(sequence) + (uint32_t)begin);
    memcpy(tcp + 4, &sequence, sizeof sequence);
    if (stop < shape->segments) tcp[13] &= (unsigned char)~(FIN | PSH);
    if (first > 0) tcp[13] &= (unsigned char)~CWR;
    /* What checksum offload expects to find: the sum of the pseudo header, which has the new length. */
    put16(tcp + 16, fold(sum16(ip + 12, 8, IPPROTO_TCP + (uint32_t)(total - shape->ip_header))));
    return part;
}

/* ---- the line ---- */

static int64_t draw_loss(void) {
    if (line.loss <= 0) return INT64_MAX;
    return (int64_t)(log(1 - erand48(chance)) / log1p(-line.loss));
}

static void enqueue(struct direction *way, struct packet *packet, int64_t due) {
    packet->due = due;
    if (way->last) way->last->next = packet;
    else way->first = packet;
    way->last = packet;
}

static struct packet *copy_of(const unsigned char *data, size_t length) {
    struct packet *packet = new_packet(length);
    memcpy(packet->data, data, length);
    return packet;
}

/* Segments of this size that the queue still takes. */
static int room_for(const struct direction *way, double segment_ns, int wanted, int64_t now) {
    double room_ns = line.queue_ns - (way->idle_at - now);
    if (room_ns < 0) return 0;
    double fitting = room_ns / segment_ns + 1;
    return fitting < wanted ? (int)fitting : wanted;
}

static void let_in(struct direction *way, const unsigned char *data, size_t length, int64_t now) {
    struct shape shape = shape_of(data, length);
    way->segments += shape.segments;
    if (line.cut) {
        way->cut += shape.segments;
        return;
    }
    double wire_bytes = (double)shape.payload + shape.segments * (double)(shape.headers + FRAME_OVERHEAD);
    double segment_ns = wire_bytes / shape.segments * line.ns_per_byte;
    if (way->idle_at < now) way->idle_at = now;
    int fitting = room_for(way, segment_ns, shape.segments, now);
    way->overflowed += shape.segments - fitting;
    way->idle_at += fitting * segment_ns;
    int64_t due = (int64_t)way->idle_at + line.delay_ns;

    if (fitting == shape.segments && way->until_loss >= fitting) {
        way->until_loss -= fitting;
        enqueue(way, copy_of(data, length), due);
        return;
    }
    for (int at = 0; at < fitting; at++) {
        int passing = way->until_loss < fitting - at ? (int)way->until_loss : fitting - at;
        if (passing) enqueue(way, slice(data, &shape, at, at + passing), due);
        way->until_loss -= passing;
        at += passing;
        if (at < fitting) {
            way->lost++;
            way->until_loss = draw_loss();
        }
    }
}

static bool take_in(struct direction *way) {
    static unsigned char buffer[MAX_PACKET];
    int taken = 0;
    for (; taken < BATCH; taken++) {
        ssize_t length = read(way->from, buffer, sizeof buffer);
        if (length <= (ssize_t)OFFLOAD) break;
        if (buffer[OFFLOAD] >> 4 == 4) let_in(way, buffer, (size_t)length, now_ns());
    }
    return taken > 0;
}

/* Hands over what has arrived; returns when the next will. What the kernel behind us does not take is gone. */
static int64_t deliver(struct direction *way, int64_t now) {
    while (way->first && way->first->due <= now) {
        struct packet *packet = way->first;
        if (write(way->to, packet->data, packet->length) > 0) way->bytes += packet->length - OFFLOAD;
        way->first = packet->next;
        if (!way->first) way->last = NULL;
        free(packet);
    }
    return way->first ? way->first->due : INT64_MAX;
}

/* ---- control ---- */

static void set_rate(double mbit) {
    line.ns_per_byte = 8e3 / mbit;
}

static void print_counters(const char *name, const struct direction *way, const char *end) {
    printf("\"%s\":{\"bytes\":%lu,\"segments\":%lu,\"lost\":%lu,\"overflowed\":%lu,\"cut\":%lu}%s", name, way->bytes,
           way->segments, way->lost, way->overflowed, way->cut, end);
}

static void obey(const char *command, struct direction *ways) {
    char word[16] = "";
    double value = 0;
    sscanf(command, "%15s %lf", word, &value);
    if (!strcmp(word, "rate") && value > 0) set_rate(value);
    else if (!strcmp(word, "delay")) line.delay_ns = (int64_t)(value * 1e3);
    else if (!strcmp(word, "queue")) line.queue_ns = (int64_t)(value * 1e6);
    else if (!strcmp(word, "loss")) {
        line.loss = value / 1e6;
        for (int i = 0; i < 2; i++) ways[i].until_loss = draw_loss();
    } else if (!strcmp(word, "cut")) line.cut = true;
    else if (!strcmp(word, "heal")) line.cut = false;
    else if (strcmp(word, "stats")) {
        printf("what is \"%s\"?\n", word);
        fflush(stdout);
        return;
    }
    printf("{");
    print_counters("a_to_b", &ways[0], ",");
    print_counters("b_to_a", &ways[1], "}\n");
    fflush(stdout);
}

/* False once nobody can command any more. */
static bool listen_to_commands(struct direction *ways) {
    static char text[256];
    static size_t have;
    ssize_t more = read(STDIN_FILENO, text + have, sizeof text - 1 - have);
    if (more < 0) return errno == EAGAIN || errno == EINTR;
    if (more == 0) return false;
    have += (size_t)more;
    text[have] = 0;
    for (char *end; (end = strchr(text, '\n'));) {
        *end = 0;
        obey(text, ways);
        have -= (size_t)(end + 1 - text);
        memmove(text, end + 1, have + 1);
    }
    return have < sizeof text - 1;
}

static void wait_until(int64_t due, const struct direction *ways) {
    int64_t wait = due - now_ns();
    if (wait > LONGEST_WAIT_NS) wait = LONGEST_WAIT_NS;
    if (wait <= 0) return;
    struct pollfd files[] = {{ways[0].from, POLLIN, 0}, {ways[1].from, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
    struct timespec time = {0, wait};
    ppoll(files, 3, &time, NULL);
}

static int run(char **argument) {
    pid_t parent = getppid();
    int a, b;
    set_rate(atof(argument[0]));
    line.delay_ns = (int64_t)(atof(argument[1]) * 1e3);
    line.loss = atof(argument[2]) / 1e6;
    line.queue_ns = (int64_t)(atof(argument[3]) * 1e6);
    chance[0] = (unsigned short)atoi(argument[4]);
    setpriority(PRIO_PROCESS, 0, -20); /* a late line is a slower line; without the right to it we still run */
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    int namespace_a = new_namespace("10.99.0.1", &a), namespace_b = new_namespace("10.99.0.2", &b);
    struct direction ways[2] = {{.from = a, .to = b}, {.from = b, .to = a}};
    for (int i = 0; i < 2; i++) ways[i].until_loss = draw_loss();
    fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
    printf("ready %d %d\n", namespace_a, namespace_b);
    fflush(stdout);
    while (listen_to_commands(ways) && getppid() == parent) {
        bool busy = take_in(&ways[0]);
        busy |= take_in(&ways[1]);
        int64_t now = now_ns(), next = deliver(&ways[0], now), other = deliver(&ways[1], now);
        if (!busy) wait_until(next < other ? next : other, ways);
    }
    return 0;
}

static int enter(char **argument) {
    int namespace = open(argument[0], O_RDONLY | O_CLOEXEC);
    if (namespace < 0 || setns(namespace, CLONE_NEWNET) < 0) fail(argument[0]);
    execvp(argument[1], argument + 1);
    perror(argument[1]);
    return 127;
}

int main(int count, char **argument) {
    if (count == 7 && !strcmp(argument[1], "run")) return run(argument + 2);
    if (count >= 4 && !strcmp(argument[1], "enter")) return enter(argument + 2);
    fprintf(stderr, "usage: link run MBIT ONE_WAY_US LOSS_PPM QUEUE_MS SEED | link enter NAMESPACE COMMAND...\n");
    return 2;
}

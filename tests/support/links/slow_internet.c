// A small Internet in user space: a TUN device "wan" in each of several network namespaces, and packets carried between
// them by IPv4 address. What leaves a place goes at its line's rate, and arrives later by the delays of both places.
//
// Reads lines on stdin, and answers each with "ok":
//   place NAMESPACE ADDRESS DELAY_US MBPS    a device in that namespace, and where it is
//   address NAMESPACE ADDRESS                its address from now on, in place of the old one
// Ends with its stdin. Needs root; kernels without netem have TUN.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_PLACES = 24, MOST_QUEUED = 4096, MOST_BYTES = 65536, READ_AT_ONCE = 64 };
static const long long QUEUE_NS = 100 * 1000000LL;  // a line's buffer, as time

typedef struct { char *data; int length; long long due_ns; } Packet;
typedef struct { Packet ring[MOST_QUEUED]; unsigned first, end; } Queue;
typedef struct {
    char name[64];
    int device;
    in_addr_t address;
    long long delay_ns, free_ns;  // free_ns: when its line has sent all that was given to it
    double mbps;
    Queue to[MOST_PLACES];  // one for each destination: their delays differ
} Place;

static Place *places[MOST_PLACES];
static int count;

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int open_device(const char *namespace) {
    char path[128];
    snprintf(path, sizeof path, "/var/run/netns/%s", namespace);
    int joined = open(path, O_RDONLY);
    if (joined < 0 || setns(joined, CLONE_NEWNET)) { perror(path); exit(1); }
    close(joined);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq request = {.ifr_name = "wan"};
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    if (device < 0 || ioctl(device, TUNSETIFF, &request)) { perror("tun"); exit(1); }
    return device;
}

static Place *find(const char *name) {
    for (int at = 0; at < count; at++)
        if (!strcmp(places[at]->name, name)) return places[at];
    return NULL;
}

static void obey(const char *line) {
    char name[64], address[64];
    double delay_us, mbps;
    if (sscanf(line, "place %63s %63s %lf %lf", name, address, &delay_us, &mbps) == 4 && count < MOST_PLACES) {
        Place *place = places[count] = calloc(1, sizeof *place);
        strcpy(place->name, name);
        place->device = open_device(name);
        place->address = inet_addr(address);
        place->delay_ns = delay_us * 1000;
        place->mbps = mbps;
        count++;
    } else if (sscanf(line, "address %63s %63s", name, address) == 2 && find(name)) {
        find(name)->address = inet_addr(address);
    } else if (*line != '\n') {
        fprintf(stderr, "not understood: %s\n", line);
        exit(1);
    }
    puts("ok");
    fflush(stdout);
}

static void take_in(Place *from, const char *data, int length, long long now) {
    in_addr_t wanted;
    memcpy(&wanted, data + 16, sizeof wanted);
    for (int at = 0; at < count; at++) {
        if (places[at]->address != wanted) continue;
        Queue *queue = &from->to[at];
        long long starts = from->free_ns > now ? from->free_ns : now;
        if (starts - now > QUEUE_NS || queue->end - queue->first >= MOST_QUEUED) return;  // dropped
        from->free_ns = starts + (long long)(length * 8 * 1000 / from->mbps);
        Packet *packet = &queue->ring[queue->end++ % MOST_QUEUED];
        packet->data = memcpy(malloc(length), data, length);
        packet->length = length;
        packet->due_ns = from->free_ns + from->delay_ns + places[at]->delay_ns;
        return;
    }
}

static long long hand_out(long long now) {  // returns when the next packet is due
    long long next = now + 100 * 1000000LL;
    for (int from = 0; from < count; from++)
        for (int to = 0; to < count; to++) {
            Queue *queue = &places[from]->to[to];
            for (; queue->first != queue->end; queue->first++) {
                Packet *packet = &queue->ring[queue->first % MOST_QUEUED];
                if (packet->due_ns > now) {
                    if (packet->due_ns < next) next = packet->due_ns;
                    break;
                }
                if (write(places[to]->device, packet->data, packet->length) < 0) { /* lost, as on any line */ }
                free(packet->data);
            }
        }
    return next;
}

int main(void) {
    static char data[MOST_BYTES], line[256];
    struct pollfd watched[MOST_PLACES + 1];
    setvbuf(stdin, NULL, _IONBF, 0);
    for (;;) {
        long long wait_ns = hand_out(now_ns()) - now_ns();
        if (wait_ns < 0) wait_ns = 0;
        struct timespec wait = {wait_ns / 1000000000LL, wait_ns % 1000000000LL};
        watched[count] = (struct pollfd){.fd = 0, .events = POLLIN};
        for (int at = 0; at < count; at++) watched[at] = (struct pollfd){.fd = places[at]->device, .events = POLLIN};
        int before = count;
        ppoll(watched, before + 1, &wait, NULL);
        for (int at = 0; at < before; at++) {
            if (!(watched[at].revents & POLLIN)) continue;
            for (int turn = 0; turn < READ_AT_ONCE; turn++) {
                int length = read(places[at]->device, data, sizeof data);
                if (length <= 0) break;
                if (length >= 20 && (data[0] >> 4) == 4) take_in(places[at], data, length, now_ns());
            }
        }
        if (watched[before].revents) {
            if (!fgets(line, sizeof line, stdin)) return 0;
            obey(line);
        }
    }
}

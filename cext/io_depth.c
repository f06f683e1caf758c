/* How many transfers a device is given at once. One too few leaves it idle, and more than it can use only make each of them slower: reads
 * that somebody waits for stand behind a queue of writes. So the depth is tried: after a window of transfers the next one runs at twice or
 * at half the depth, and what moved in it decides. More depth must pay, less depth must cost next to nothing, and a trial that fails is
 * followed by a rest. Only time in which transfers had to wait for the depth counts: a device without work says nothing about its depth. */
#include "io.h"

enum {
    START = 4,
    WINDOW_NS = 250000000,
    WINDOW_COUNT = 16, /* and four rounds of its depth, whichever is more */
    REST = 10,
};
static const double GROW_GAIN = 1.07, SHRINK_LOSS = 0.97;

void hkv_depth_start(struct hkv_depth *depth, unsigned most) {
    *depth = (struct hkv_depth){.now = START < most ? START : most, .most = most, .up = true};
}

static void new_window(struct hkv_depth *depth) {
    depth->count = 0;
    depth->bytes = depth->busy_ns = 0;
}

static void decide(struct hkv_depth *depth, double rate) {
    if (depth->trying) {
        bool pays = depth->up ? rate > depth->rate * GROW_GAIN : rate > depth->rate * SHRINK_LOSS;
        depth->trying = false;
        if (!pays) {
            depth->skip = depth->now;
            depth->now = depth->before;
            depth->up = !depth->up;
            depth->rest = REST;
            return;
        }
    }
    depth->rate = rate;
    if (depth->rest > 0) {
        depth->rest--;
        return;
    }
    unsigned next = depth->up ? depth->now * 2 : depth->now / 2;
    if (next > depth->most) next = depth->most;
    if (next == 0 || next == depth->now) {
        depth->up = !depth->up;
        depth->rest = REST;
        return;
    }
    depth->before = depth->now;
    depth->skip = depth->now;
    depth->now = next;
    depth->trying = true;
}

void hkv_depth_ended(struct hkv_depth *depth, uint64_t bytes, uint64_t now_ns, bool waiting) {
    uint64_t last_ns = depth->last_ns;
    depth->last_ns = waiting ? now_ns : 0;
    if (last_ns == 0 || !waiting) return;
    if (depth->skip > 0) {
        depth->skip--;
        return;
    }
    depth->count++;
    depth->bytes += bytes;
    depth->busy_ns += now_ns - last_ns;
    if (depth->busy_ns < WINDOW_NS || depth->count < WINDOW_COUNT || depth->count < 4 * depth->now) return;
    decide(depth, (double)depth->bytes / (double)depth->busy_ns);
    new_window(depth);
}

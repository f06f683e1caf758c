/* io_depth.c on a device that serves `knee` transfers at a time at full speed, more of them slower, with noise: prints the depth at the end
 * of each second, simulated.
 *
 *     io_depth KNEE MOST NOISE_PERCENT SECONDS SEED */
#include "../../cext/io_depth.c"

#include <stdio.h>
#include <stdlib.h>

enum { BLOCK = 1 << 20, FULL_SPEED = 1000000000 /* bytes a second */, CHANGES_NS = 50000000 };

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    unsigned knee = (unsigned)atoi(argv[1]);
    double noise = atof(argv[3]) / 100, speed = 1;
    uint64_t seconds = strtoull(argv[4], NULL, 10), now_ns = 1, noisy_until = 0;
    struct hkv_depth depth;
    srand48(atol(argv[5]));
    hkv_depth_start(&depth, (unsigned)atoi(argv[2]));
    for (uint64_t second = 1; second <= seconds;) {
        double busy = depth.now < knee ? (double)depth.now / knee : 1;
        if (now_ns >= noisy_until) {
            speed = 1 + noise * (2 * drand48() - 1);
            noisy_until = now_ns + CHANGES_NS;
        }
        now_ns += (uint64_t)(BLOCK / (FULL_SPEED * busy * speed) * 1e9);
        hkv_depth_ended(&depth, BLOCK, now_ns, true);
        if (now_ns < second * 1000000000u) continue;
        printf("%u\n", depth.now);
        second++;
    }
    return 0;
}

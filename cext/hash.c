/* SHA-256 (FIPS 180-4) and xxh3.
 *
 * A key is SHA-256(fingerprint, 32 zero bytes, id). The first 64 bytes are the same for all keys of a namespace and fill exactly one
 * SHA block, so their state is computed once and an id of up to 55 bytes costs one compression. A compression is a chain of dependent
 * instructions that leaves most of a core idle, so keys are derived two at a time. */
#define _GNU_SOURCE
#include "hash.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define XXH_DISPATCH_AVX2 1 /* declares that code too, beside the SSE2 that every such CPU has */
#define XXH_TARGET_AVX2 __attribute__((target("avx2")))
#define XXH_ACC_ALIGN 32
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#define XXH_INLINE_ALL
#include "xxhash.h"

enum { BLOCK = 64 };

static const uint32_t initial_state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t load_be32(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void store_be32(uint8_t *p, uint32_t v) {
    p[0] = v >> 24, p[1] = v >> 16, p[2] = v >> 8, p[3] = v;
}

static void store_digest(const uint32_t state[8], uint8_t *digest) {
    for (int i = 0; i < 8; i++) store_be32(digest + 4 * i, state[i]);
}

/* ---- compression: portable, and by instructions; each in one lane and in two independent ones -------------------------------- */

static uint32_t rotate(uint32_t x, int n) {
    return x >> n | x << (32 - n);
}

static void portable_blocks(uint32_t state[8], const uint8_t *data, size_t blocks) {
    for (; blocks > 0; blocks--, data += BLOCK) {
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++) w[i] = load_be32(data + 4 * i);
        for (int i = 16; i < 64; i++) {
            uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
            uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
            w[i] = w[i - 16] + s0 + w[i - 7] + s1;
        }
        memcpy(s, state, sizeof s);
        for (int i = 0; i < 64; i++) {
            uint32_t e = s[4], a = s[0];
            uint32_t t1 = s[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + K[i] + w[i];
            uint32_t t2 = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 7 * sizeof s[0]);
            s[4] += t1;
            s[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++) state[i] += s[i];
    }
}

static void portable_pair(uint32_t states[2][8], const uint8_t *const data[2]) {
    for (int lane = 0; lane < 2; lane++) portable_blocks(states[lane], data[lane], 1);
}

static bool always(void) {
    return true;
}

#if defined(__x86_64__)
#define SHA_TARGET __attribute__((target("sha,sse4.1,ssse3")))

/* The instructions want the state as (a b e f) and (c d g h). */
SHA_TARGET static inline __attribute__((always_inline)) void sha_ni(int lanes, uint32_t (*states)[8], const uint8_t *const *data) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef[2], cdgh[2], abef_before[2], cdgh_before[2], w[2][4];
    for (int lane = 0; lane < lanes; lane++) {
        __m128i dcba = _mm_shuffle_epi32(_mm_loadu_si128((const void *)states[lane]), 0xb1);
        __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128((const void *)(states[lane] + 4)), 0x1b);
        abef_before[lane] = abef[lane] = _mm_alignr_epi8(dcba, hgfe, 8);
        cdgh_before[lane] = cdgh[lane] = _mm_blend_epi16(hgfe, dcba, 0xf0);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        for (int lane = 0; lane < lanes; lane++) {
            __m128i *now = &w[lane][i & 3], back3 = w[lane][(i + 1) & 3], back2 = w[lane][(i + 2) & 3], back1 = w[lane][(i + 3) & 3];
            if (i < 4) *now = _mm_shuffle_epi8(_mm_loadu_si128((const void *)(data[lane] + 16 * i)), big_endian);
            else *now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(*now, back3), _mm_alignr_epi8(back1, back2, 4)), back1);
            __m128i wk = _mm_add_epi32(*now, _mm_load_si128((const void *)(K + 4 * i)));
            cdgh[lane] = _mm_sha256rnds2_epu32(cdgh[lane], abef[lane], wk);
            abef[lane] = _mm_sha256rnds2_epu32(abef[lane], cdgh[lane], _mm_shuffle_epi32(wk, 0x0e));
        }
    for (int lane = 0; lane < lanes; lane++) {
        __m128i feba = _mm_shuffle_epi32(_mm_add_epi32(abef[lane], abef_before[lane]), 0x1b);
        __m128i dchg = _mm_shuffle_epi32(_mm_add_epi32(cdgh[lane], cdgh_before[lane]), 0xb1);
        _mm_storeu_si128((void *)states[lane], _mm_blend_epi16(feba, dchg, 0xf0));
        _mm_storeu_si128((void *)(states[lane] + 4), _mm_alignr_epi8(dchg, feba, 8));
    }
}

SHA_TARGET static void sha_ni_blocks(uint32_t state[8], const uint8_t *data, size_t blocks) {
    for (; blocks > 0; blocks--, data += BLOCK) sha_ni(1, (uint32_t (*)[8])state, &data);
}

SHA_TARGET static void sha_ni_pair(uint32_t states[2][8], const uint8_t *const data[2]) {
    sha_ni(2, states, data);
}

static bool has_sha_ni(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA) && __builtin_cpu_supports("sse4.1");
}
#elif defined(__aarch64__)
#define SHA_TARGET __attribute__((target("+sha2")))

SHA_TARGET static inline __attribute__((always_inline)) void arm_sha2(int lanes, uint32_t (*states)[8], const uint8_t *const *data) {
    uint32x4_t abcd[2], efgh[2], w[2][4];
    for (int lane = 0; lane < lanes; lane++) abcd[lane] = vld1q_u32(states[lane]), efgh[lane] = vld1q_u32(states[lane] + 4);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        for (int lane = 0; lane < lanes; lane++) {
            uint32x4_t *now = &w[lane][i & 3], back3 = w[lane][(i + 1) & 3], back2 = w[lane][(i + 2) & 3], back1 = w[lane][(i + 3) & 3];
            if (i < 4) *now = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data[lane] + 16 * i)));
            else *now = vsha256su1q_u32(vsha256su0q_u32(*now, back3), back2, back1);
            uint32x4_t wk = vaddq_u32(*now, vld1q_u32(K + 4 * i)), before = abcd[lane];
            abcd[lane] = vsha256hq_u32(abcd[lane], efgh[lane], wk);
            efgh[lane] = vsha256h2q_u32(efgh[lane], before, wk);
        }
    for (int lane = 0; lane < lanes; lane++) {
        vst1q_u32(states[lane], vaddq_u32(abcd[lane], vld1q_u32(states[lane])));
        vst1q_u32(states[lane] + 4, vaddq_u32(efgh[lane], vld1q_u32(states[lane] + 4)));
    }
}

SHA_TARGET static void arm_sha2_blocks(uint32_t state[8], const uint8_t *data, size_t blocks) {
    for (; blocks > 0; blocks--, data += BLOCK) arm_sha2(1, (uint32_t (*)[8])state, &data);
}

SHA_TARGET static void arm_sha2_pair(uint32_t states[2][8], const uint8_t *const data[2]) {
    arm_sha2(2, states, data);
}

static bool has_arm_sha2(void) {
    return getauxval(AT_HWCAP) & HWCAP_SHA2;
}
#endif

/* Best first. */
static const struct {
    const char *name;
    void (*blocks)(uint32_t state[8], const uint8_t *data, size_t blocks);
    void (*pair)(uint32_t states[2][8], const uint8_t *const data[2]);
    bool (*supported)(void);
} paths[] = {
#if defined(__x86_64__)
    {"sha_ni", sha_ni_blocks, sha_ni_pair, has_sha_ni},
#elif defined(__aarch64__)
    {"arm_sha2", arm_sha2_blocks, arm_sha2_pair, has_arm_sha2},
#endif
    {"portable", portable_blocks, portable_pair, always},
};
enum { PATHS = sizeof paths / sizeof paths[0] };
static size_t chosen = PATHS - 1;

__attribute__((constructor)) static void choose_path(void) {
    for (chosen = 0; !paths[chosen].supported();) chosen++;
}

const char *hkv_sha_path(void) {
    return paths[chosen].name;
}

bool hkv_sha_set_path(const char *name) {
    for (size_t i = 0; i < PATHS; i++)
        if (strcmp(paths[i].name, name) == 0 && paths[i].supported()) {
            chosen = i;
            return true;
        }
    return false;
}

/* ---- a digest of parts --------------------------------------------------------------------------------------------------------- */

void hkv_sha256_start(struct hkv_sha256 *sha) {
    memcpy(sha->state, initial_state, sizeof sha->state);
    sha->size = 0;
}

void hkv_sha256_add(struct hkv_sha256 *sha, const void *data, size_t size) {
    const uint8_t *from = data;
    size_t held = sha->size % BLOCK;
    if (size == 0) return;
    sha->size += size;
    if (held > 0) {
        size_t fill = BLOCK - held < size ? BLOCK - held : size;
        memcpy(sha->rest + held, from, fill);
        from += fill, size -= fill;
        if (held + fill < BLOCK) return;
        paths[chosen].blocks(sha->state, sha->rest, 1);
    }
    paths[chosen].blocks(sha->state, from, size / BLOCK);
    memcpy(sha->rest, from + size - size % BLOCK, size % BLOCK);
}

/* Appends SHA's padding to the `held` bytes of the last, partial block: 0x80, zeros, and the size of the whole message in bits.
 * Returns how many blocks (1 or 2) there are to compress. */
static size_t pad(uint8_t tail[2 * BLOCK], size_t held, uint64_t size) {
    size_t blocks = held + 1 + 8 <= BLOCK ? 1 : 2;
    tail[held] = 0x80;
    memset(tail + held + 1, 0, blocks * BLOCK - held - 1 - 8);
    store_be32(tail + blocks * BLOCK - 8, size >> 29);
    store_be32(tail + blocks * BLOCK - 4, (uint32_t)(size << 3));
    return blocks;
}

void hkv_sha256_end(struct hkv_sha256 *sha, uint8_t digest[HKV_DIGEST]) {
    uint8_t tail[2 * BLOCK];
    size_t held = sha->size % BLOCK;
    memcpy(tail, sha->rest, held);
    paths[chosen].blocks(sha->state, tail, pad(tail, held, sha->size));
    store_digest(sha->state, digest);
}

/* ---- keys ---------------------------------------------------------------------------------------------------------------------- */

void hkv_keys_prepare(const uint8_t fingerprint[32], uint32_t prepared[8]) {
    uint8_t first[BLOCK] = {0};
    memcpy(first, fingerprint, 32);
    memcpy(prepared, initial_state, sizeof initial_state);
    paths[chosen].blocks(prepared, first, 1);
}

void hkv_keys_derive(const uint32_t prepared[8], const struct hkv_id *ids, size_t count, uint8_t *keys) {
    uint32_t states[2][8];
    uint8_t tails[2][2 * BLOCK];
    const uint8_t *const first[2] = {tails[0], tails[1]};
    size_t blocks[2];
    for (size_t i = 0; i < count; i += 2) {
        size_t lanes = count - i < 2 ? 1 : 2;
        for (size_t lane = 0; lane < lanes; lane++) {
            const struct hkv_id *id = &ids[i + lane];
            memcpy(states[lane], prepared, sizeof states[lane]);
            memcpy(tails[lane], id->data, id->size);
            blocks[lane] = pad(tails[lane], id->size, BLOCK + id->size);
        }
        if (lanes == 2) paths[chosen].pair(states, first);
        else paths[chosen].blocks(states[0], tails[0], 1);
        for (size_t lane = 0; lane < lanes; lane++) {
            if (blocks[lane] == 2) paths[chosen].blocks(states[lane], tails[lane] + BLOCK, 1);
            store_digest(states[lane], keys + (i + lane) * HKV_DIGEST);
        }
    }
}

uint64_t hkv_xxh3_64(const void *data, size_t size) {
    return XXH3_64bits(data, size);
}

uint64_t hkv_xxh3_64_seeded(const void *data, size_t size, uint64_t seed) {
    return XXH3_64bits_withSeed(data, size, seed);
}

_Static_assert(sizeof(struct hkv_xxh3) >= sizeof(XXH3_state_t) && _Alignof(struct hkv_xxh3) >= _Alignof(XXH3_state_t), "hash.h");

void hkv_xxh3_start(struct hkv_xxh3 *sum, uint64_t seed) {
    XXH3_state_t *state = (void *)sum;
    XXH3_INITSTATE(state); /* a reset reads what an earlier one left */
    XXH3_64bits_reset_withSeed(state, seed);
}

static void add_plain(struct hkv_xxh3 *sum, const void *data, size_t size) {
    XXH3_64bits_update((void *)sum, data, size);
}

#if defined(__x86_64__)
/* Measured on Zen 3: 27 against 18 GB/s in parts of 2 KiB. */
__attribute__((target("avx2"))) static void add_avx2(struct hkv_xxh3 *sum, const void *data, size_t size) {
    XXH3_update((void *)sum, data, size, XXH3_accumulate_avx2, XXH3_scrambleAcc_avx2);
}
#endif

void hkv_xxh3_add(struct hkv_xxh3 *sum, const void *data, size_t size) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        add_avx2(sum, data, size);
        return;
    }
#endif
    add_plain(sum, data, size);
}

uint64_t hkv_xxh3_end(const struct hkv_xxh3 *sum) {
    return XXH3_64bits_digest((const void *)sum);
}

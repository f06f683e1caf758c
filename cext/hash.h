/* SHA-256 in the shapes that block ids and keys need, and xxh3. See hash.c. */
#ifndef HOSTKV_HASH_H
#define HOSTKV_HASH_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HKV_DIGEST 32
#define HKV_MAX_ID 64

/* SHA-256 of several parts, one after the other. */
struct hkv_sha256 {
    uint32_t state[8];
    uint64_t size;    /* bytes added so far */
    uint8_t rest[64]; /* the last size % 64 of them */
};
void hkv_sha256_start(struct hkv_sha256 *sha);
void hkv_sha256_add(struct hkv_sha256 *sha, const void *data, size_t size);
void hkv_sha256_end(struct hkv_sha256 *sha, uint8_t digest[HKV_DIGEST]);

/* The state after (fingerprint, 32 zero bytes), from which every key of a namespace starts. */
void hkv_keys_prepare(const uint8_t fingerprint[32], uint32_t prepared[8]);

struct hkv_id {
    const uint8_t *data;
    size_t size; /* 1..HKV_MAX_ID */
};
/* Joined keys of `count` ids. */
void hkv_keys_derive(const uint32_t prepared[8], const struct hkv_id *ids, size_t count, uint8_t *keys);

uint64_t hkv_xxh3_64(const void *data, size_t size);
uint64_t hkv_xxh3_64_seeded(const void *data, size_t size, uint64_t seed);

/* xxh3-64 with a seed, of bytes that come in parts of any size. */
struct hkv_xxh3 {
    _Alignas(64) uint8_t state[576]; /* an XXH3_state_t */
};
void hkv_xxh3_start(struct hkv_xxh3 *sum, uint64_t seed);
void hkv_xxh3_add(struct hkv_xxh3 *sum, const void *data, size_t size);
uint64_t hkv_xxh3_end(const struct hkv_xxh3 *sum);

/* The code that SHA-256 runs on, e.g. "sha_ni". Setting it is for tests: false when this CPU lacks it. */
const char *hkv_sha_path(void);
bool hkv_sha_set_path(const char *name);
#endif

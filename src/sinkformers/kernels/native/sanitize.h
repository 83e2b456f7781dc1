// The workspace is one piece of memory, so AddressSanitizer would not see an access beyond one of its parts. A build
// with it poisons what no part owns, leaves a gap behind every part, and fills the rest with NaN.
#pragma once
#include <cstddef>
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ADDRESS_SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(ADDRESS_SANITIZED)
#include <cstring>
#include <mutex>
#include <sanitizer/asan_interface.h>
constexpr size_t WORKSPACE_GAP = 64;
static inline void forbid(void *at, size_t bytes) {
    ASAN_UNPOISON_MEMORY_REGION(at, bytes);
    std::memset(at, 0xff, bytes);
    ASAN_POISON_MEMORY_REGION(at, bytes);
}
// All members of a team allow the parts of one workspace, and the sanitizer's own record of a few bytes is not safe to
// write from two threads.
inline std::mutex &records() {
    static std::mutex only;
    return only;
}
static inline void allow(void *at, size_t bytes) {
    const std::lock_guard<std::mutex> lock(records());
    ASAN_UNPOISON_MEMORY_REGION(at, bytes);
}
#else
constexpr size_t WORKSPACE_GAP = 0;
static inline void forbid(void *, size_t) {}
static inline void allow(void *, size_t) {}
#endif

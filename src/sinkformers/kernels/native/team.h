// Who works on a matrix, and in what memory.
#pragma once
#include "sanitize.h"
#include "simd.h"

namespace ISA {

struct Team {
    int id, size;
    void (*wait)();
    void barrier() const { if (size > 1) wait(); }
    // The share [from, to) of a range that a member works on.
    void share(int count, int &from, int &to, int unit = MR) const {
        const int chunk = round_up((count + size - 1) / size, unit);
        from = std::min(count, id * chunk);
        to = std::min(count, from + chunk);
    }
};

struct Arena {  // with a null base it only measures
    char *base;
    size_t used = 0;
    template <class T> T *take(size_t count) {
        const size_t at = used;
        used += (count * sizeof(T) + 63) / 64 * 64 + WORKSPACE_GAP;
        if (base) allow(base + at, count * sizeof(T));
        return base ? (T *)(base + at) : nullptr;
    }
};
// The members' shares of a sum, `apart` from each other, added up in their order.
template <class T> static void gather(const Team &team, const T *shares, size_t apart, T *sum, int count) {
    if (team.size == 1) {
        if (sum != shares) std::copy(shares, shares + count, sum);
        return;
    }
    team.barrier();
    const int chunk = (count + team.size - 1) / team.size, from = std::min(count, team.id * chunk), to = std::min(count, from + chunk);
    for (int j = from; j < to; j++) {
        T total = shares[j];
        for (int t = 1; t < team.size; t++) total += shares[t * apart + j];
        sum[j] = total;
    }
    team.barrier();
}
}  // namespace ISA

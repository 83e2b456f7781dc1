// Who works on a matrix, and in what memory.
#pragma once
#include "sanitize.h"
#include "simd.h"

namespace ISA {

struct Team {
    int id, size;
    void (*wait)();
    void barrier() const {
        if (size > 1) wait();
    }
    // The share [from, to) of a range that a member works on.
    void share(int count, int &from, int &to, int unit = MR) const {
        const int chunk = round_up((count + size - 1) / size, unit);
        from = std::min(count, id * chunk);
        to = std::min(count, from + chunk);
    }
};

struct Arena { // with a null base it only measures
    char *base;
    size_t used = 0;
    template <class T> T *take(size_t count) {
        const size_t at = used;
        used += (count * sizeof(T) + 63) / 64 * 64 + WORKSPACE_GAP;
        if (base) allow(base + at, count * sizeof(T));
        return base ? (T *)(base + at) : nullptr;
    }
};
// Column sums over very many rows: after SPAN rows they are put aside, since one float32 that takes 100,000 like terms
// one after the other loses nearly a thousandth of their sum.
constexpr int SPAN = 170 * MR;
template <class T> struct Aside {
    T *near, *far;
    const int count, rows;
    int since = 0;
    Aside(T *near, T *far, int count, int rows) : near(near), far(far), count(count), rows(rows) {
        if (rows > SPAN) std::fill(far, far + count, (T)0);
    }
    void added(int some) {
        if (rows <= SPAN || (since += some) < SPAN) return;
        since = 0;
        for (int j = 0; j < count; j++) {
            far[j] += near[j];
            near[j] = 0;
        }
    }
    void finish() const {
        for (int j = 0; rows > SPAN && j < count; j++) near[j] += far[j];
    }
};
// The members' shares of a sum, `apart` from each other, added up in their order.
template <class T> static void gather(const Team &team, const T *shares, size_t apart, T *sum, int count) {
    if (team.size == 1) {
        if (sum != shares) std::copy(shares, shares + count, sum);
        return;
    }
    team.barrier();
    const int chunk = (count + team.size - 1) / team.size, from = std::min(count, team.id * chunk),
              to = std::min(count, from + chunk);
    for (int j = from; j < to; j++) {
        T total = shares[j];
        for (int t = 1; t < team.size; t++) total += shares[t * apart + j];
        sum[j] = total;
    }
    team.barrier();
}
} // namespace ISA

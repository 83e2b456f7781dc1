// All kernels for one instruction set. The build compiles this file once per set, with ISA and VECTOR_BYTES defined.
#include "attention_backward.h"
#include "attention_forward.h"
#include "kernels.h"

namespace ISA {
template <class T> static size_t attention_bytes(const AttentionArguments &args, int size, bool backward, bool stored) {
    return Head<T>::bytes(args, size, backward, stored);
}
template <class T> static void attention_heads(const AttentionArguments &args, const Share &share) {
    const Team team{share.id, share.size, share.wait};
    if (share.backward) {
        Backward<T> head(args, team, true, share.stored, share.workspace);
        for (int64_t at; (at = share.next(share.queue)) >= 0;) head.run(at);
    } else {
        Forward<T> head(args, team, false, share.stored, share.workspace);
        for (int64_t at; (at = share.next(share.queue)) >= 0;) head.run(at);
    }
}
extern const Kernels kernels = {
    {attention_bytes<float>, attention_bytes<double>},
    {attention_heads<float>, attention_heads<double>},
};
}  // namespace ISA

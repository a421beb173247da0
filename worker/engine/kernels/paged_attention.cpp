// Causal attention of a flat batch over a paged cache: decodes, prompt chunks and mixtures of both in one call.
//
// The work is cut into tasks (attention_plan.h) that threads take one after the other (attention_worker.h), each going
// through its keys tile by tile (attention_tile.h). The cut follows the load; the results do not depend on it.

#include <omp.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "attention_worker.h"

namespace horde {
namespace {

constexpr int64_t kSerialValues = 1 << 14;  // of the cache; reading fewer is not worth waking the threads

template <typename P, typename Q>
void run(const Call<Q>& call, const Rows<const Q>& key, const Rows<const Q>& value) {
    static thread_local Plan own_plan;
    static thread_local Scratch own_workspace;
    const int64_t threads = omp_get_max_threads(), heads = call.pool.kv_heads;
    make_plan(call, threads, own_plan);
    Plan& plan = own_plan;  // of the caller: by the other name each thread would find its own
    float* workspace = own_workspace.floats(plan.partial_floats * heads);
    const int64_t tasks = static_cast<int64_t>(plan.tasks.size()), all = tasks * heads;
    // With plenty to do, a thread takes a task for all heads: it can fetch the next head's keys ahead.
    const int64_t chunk = tasks >= kTasksPerThread * threads ? heads : 1;
#pragma omp parallel if (plan.values > kSerialValues)
    {
        if (key.data != nullptr) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < call.step.tokens * heads; ++i) {
                const int64_t token = i / heads, head = i % heads, slot = call.step.slots[token];
                store_key<Q, P>(call.pool, slot, head, key.at(token, head));
                store_value<Q, P>(call.pool, slot, head, value.at(token, head));
            }
        }
        static thread_local Scratch own;
        Worker<P> worker(call.pool, call.width(), own);
#pragma omp for schedule(dynamic, chunk) nowait
        for (int64_t i = 0; i < all; ++i)
            worker.run(call, plan, plan.tasks[static_cast<size_t>(i / heads)], i % heads, workspace);
    }
}

template <typename P, typename Q>
void store_rows(const HordeStep& step, const HordePool& pool, const Rows<const Q>& key, const Rows<const Q>& value) {
    const int64_t values = step.tokens * pool.kv_heads * (pool.key_size + pool.value_size);
#pragma omp parallel for schedule(static) if (values > kSerialValues)
    for (int64_t i = 0; i < step.tokens * pool.kv_heads; ++i) {
        const int64_t token = i / pool.kv_heads, head = i % pool.kv_heads, slot = step.slots[token];
        store_key<Q, P>(pool, slot, head, key.at(token, head));
        store_value<Q, P>(pool, slot, head, value.at(token, head));
    }
}

template <typename Q>
Rows<const Q> rows(const void* data, int64_t token_stride, int64_t head_stride) {
    return {static_cast<const Q*>(data), token_stride, head_stride};
}

}  // namespace
}  // namespace horde

using namespace horde;

extern "C" {

// 0, or which of the step's parts names a place outside the pool: 1 a block table, 2 a slot, 3 a length.
int horde_check_step(const HordeStep* step, int64_t blocks, int64_t block_size) {
    for (int64_t s = 0; s < step->sequences; ++s) {
        const int64_t tokens = step->query_starts[s + 1] - step->query_starts[s];
        const int64_t used = (step->context_lengths[s] + block_size - 1) / block_size;
        if (tokens < 0 || step->context_lengths[s] < tokens || used > step->table_stride) return 3;
        for (int64_t i = 0; i < used; ++i) {
            const int32_t block = step->block_tables[s * step->table_stride + i];
            if (block < 0 || block >= blocks) return 1;
        }
    }
    if (step->query_starts[0] != 0 || step->query_starts[step->sequences] != step->tokens) return 3;
    for (int64_t t = 0; t < step->tokens; ++t)
        if (step->slots[t] < 0 || step->slots[t] >= blocks * block_size) return 2;
    return 0;
}

// Asks for large pages under the whole pages of this memory: the cache is too large for the CPU's table of small ones.
void horde_use_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / page * page;
    // A kernel that refuses only makes us slower.
    if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

// Stores the step's keys and values, if it is given them, then attends.
void horde_paged_attention(const HordeCall* asked) {
    const HordeCall& from = *asked;
    const auto with = [&](auto row) {
        using Q = decltype(row);
        const Call<Q> call{*from.step,
                           *from.pool,
                           rows<Q>(from.query, from.query_token_stride, from.query_head_stride),
                           static_cast<Q*>(from.out),
                           from.sinks,
                           from.scale,
                           Scoring{from.softcap, from.window}};
        const auto key = rows<Q>(from.key, from.key_token_stride, from.key_head_stride);
        const auto value = rows<Q>(from.value, from.value_token_stride, from.value_head_stride);
        from.pool->is_bf16 ? run<bf16>(call, key, value) : run<float>(call, key, value);
    };
    from.is_bf16 ? with(bf16{}) : with(0.0f);
}

// The first half of the above alone; rows are floats, or bf16 if `is_bf16`.
void horde_store_kv(const HordeStep* step, const HordePool* pool, const void* key, int64_t key_token_stride,
                    int64_t key_head_stride, const void* value, int64_t value_token_stride, int64_t value_head_stride,
                    int is_bf16) {
    const auto with = [&](auto row) {
        using Q = decltype(row);
        const auto k = rows<Q>(key, key_token_stride, key_head_stride);
        const auto v = rows<Q>(value, value_token_stride, value_head_stride);
        pool->is_bf16 ? store_rows<bf16>(*step, *pool, k, v) : store_rows<float>(*step, *pool, k, v);
    };
    is_bf16 ? with(bf16{}) : with(0.0f);
}

}  // extern "C"

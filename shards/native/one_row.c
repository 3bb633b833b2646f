/* Decoder layers of the Llama family for one token, each a single call during which weights are read nearly all the
 * time; and products alone. What Python calls is at the end: `one_row.py` and `one_row_layers.py` have the same fields.
 * Compiled on the machine that runs it (`compiling.py`), so that the compiler chooses the instructions. */

#include <omp.h>

#include "products.h"

#define TILE 64 /* keys whose scores are weighed together */
#define MOST_QUERIES 16
#define MOST_DIM 256

typedef struct {
    matrix heads[3]; /* queries, keys, values; or one for all */
    matrix out, gated[2], down;
    const float *before, *behind, *query_norm, *key_norm;
    int64_t head_matrices, gated_matrices;
    int64_t queries, keys, dim, hidden, inner, window;
    float before_epsilon, behind_epsilon, query_epsilon, key_epsilon, scaling;
} layer;

typedef struct {
    void *keys, *values;
    int64_t head_stride, token_stride, tokens; /* the new one is the last */
} context;

/* Root mean square normalization (Zhang and Sennrich 2019). */
static void normalize(const float *from, const float *weight, float epsilon, int64_t count, float *to) {
    float squares = 0;
    for (int64_t i = 0; i < count; i++) squares += from[i] * from[i];
    float factor = 1.0f / sqrtf(squares / (float)count + epsilon);
    for (int64_t i = 0; i < count; i++) to[i] = from[i] * factor * weight[i];
}

/* Rotary positions of one head: pairs are the i-th numbers of both halves. */
static void rotate(float *head, const float *cosines, const float *sines, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float left = head[i], right = head[i + half];
        head[i] = left * cosines[i] - right * sines[i];
        head[i + half] = right * cosines[i + half] + left * sines[i + half];
    }
}

/* e to the power of a number that is not positive, by its series: loops of it become vectors. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    const int32_t whole = (int32_t)(x * 1.44269504f - 0.5f);
    const float r = x - (float)whole * 0.693147181f;
    const float series =
        1 + r * (1 + r * (1 / 2.0f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r * (1 / 720.0f))))));
    union { int32_t word; float number; } power = {(whole + 127) << 23};
    return series * power.number;
}

/* Hendrycks and Gimpel 2016: x by its logistic function. */
static inline float silu(float x) {
    const float e = exponential(-fabsf(x));
    return x * (x < 0 ? e : 1.0f) / (1.0f + e);
}

/* The queries [count][dim] of one key head over its keys and values: softmax in tiles (Dao et al. 2022). */
static void attend(const float *queries, int64_t count, int64_t dim, const context *cache, int halves, int64_t head,
                   int64_t first, float scaling, float *result) {
    float scores[MOST_QUERIES][TILE], largest[MOST_QUERIES], weight[MOST_QUERIES], tile[TILE * MOST_DIM];
    const int64_t size = halves ? 2 : 4;
    for (int64_t q = 0; q < count; q++) largest[q] = -INFINITY, weight[q] = 0;
    memset(result, 0, (size_t)(count * dim) * sizeof(float));
    for (int64_t start = first; start < cache->tokens; start += TILE) {
        const int64_t tokens = cache->tokens - start < TILE ? cache->tokens - start : TILE;
        const int64_t at = head * cache->head_stride + start * cache->token_stride;
        for (int64_t t = 0; t < tokens; t++)
            widen((const char *)cache->keys + (at + t * cache->token_stride) * size, halves, dim, tile + t * dim);
        for (int64_t q = 0; q < count; q++) {
            float most = largest[q];
            for (int64_t t = 0; t < tokens; t++) {
                floats sum = {0};
                for (int64_t i = 0; i < dim; i += LANES)
                    sum += *(const floats *)(queries + q * dim + i) * *(const floats *)(tile + t * dim + i);
                scores[q][t] = sum_of(sum) * scaling;
                most = scores[q][t] > most ? scores[q][t] : most;
            }
            const float kept = exponential(largest[q] - most);
            float added = 0;
            for (int64_t t = 0; t < tokens; t++) added += scores[q][t] = exponential(scores[q][t] - most);
            for (int64_t i = 0; i < dim; i++) result[q * dim + i] *= kept;
            weight[q] = weight[q] * kept + added;
            largest[q] = most;
        }
        for (int64_t t = 0; t < tokens; t++)
            widen((const char *)cache->values + (at + t * cache->token_stride) * size, halves, dim, tile + t * dim);
        for (int64_t q = 0; q < count; q++)
            for (int64_t i = 0; i < dim; i += LANES) {
                floats sum = *(floats *)(result + q * dim + i);
                for (int64_t t = 0; t < tokens; t++) sum += *(const floats *)(tile + t * dim + i) * scores[q][t];
                *(floats *)(result + q * dim + i) = sum;
            }
    }
    for (int64_t q = 0; q < count; q++)
        for (int64_t i = 0; i < dim; i++) result[q * dim + i] /= weight[q];
}

/* Which forms can be multiplied here, a bit for each. */
int64_t one_row_forms(void) {
    int64_t forms = 1 << FLOAT_PANELS | 1 << HALF_PANELS | 1 << FLOAT_ROWS | 1 << HALF_ROWS;
    if (HAS_VECTORS_OF_BYTES) forms |= 1 << BYTE_PANELS;
    if (HAS_PRODUCTS_OF_HALVES) forms |= 1 << NF4_PANELS;
    return forms;
}

/* Floats of scratch that each thread needs for inputs of up to so many numbers. */
int64_t one_row_scratch(int64_t most) { return scratch_floats(most); }

/* One row times the transposed matrix: [columns] to [rows], both bfloat16 if `halves`, else float. `scratch`: as
 * `one_row_scratch` says for each thread. */
void one_row_product(const matrix *m, const void *row, int64_t halves, void *result, float *scratch, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
        input in = input_in(scratch + me * scratch_floats(m->columns), m->columns);
        float part[UNIT];
        widen(row, (int)halves, m->columns, in.numbers);
        prepare(m->form, m->columns, &in);
        for (int64_t at = part_of(m->rows, me, all); at < part_of(m->rows, me + 1, all); at += UNIT) {
            multiply(m, &in, at, at + UNIT, part);
            narrow(part, (int)halves, UNIT, (char *)result + at * (halves ? 2 : 4));
        }
    }
}

/* A decoder layer on the hidden states of one token, [hidden] to `result`; keys and values of the token become the last
 * of the context. `angles` are cosines and sines [2][dim]. `shared` has room for (queries + 2 keys) * dim + queries *
 * dim + hidden + inner floats, `scratch` for what `one_row_scratch(most)` says for each thread. */
void one_row_layer(const layer *l, const void *hidden, const float *angles, const context *cache, int64_t halves,
                   void *result, float *shared, float *scratch, int64_t most, int64_t threads) {
    const int64_t size = halves ? 2 : 4, dim = l->dim, every = (l->queries + 2 * l->keys) * dim;
    float *heads = shared, *attended = heads + every, *middle = attended + l->queries * dim, *gated = middle + l->hidden;
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
        float part[2 * UNIT];
        input in = input_in(scratch + me * scratch_floats(most), most);

        widen(hidden, (int)halves, l->hidden, in.numbers);
        normalize(in.numbers, l->before, l->before_epsilon, l->hidden, in.numbers);
        prepare(l->heads[0].form, l->hidden, &in);
        const int64_t from = part_of(every, me, all), to = part_of(every, me + 1, all);
        for (int64_t i = 0, before = 0; i < l->head_matrices; before += l->heads[i++].rows) {
            const int64_t first = from > before ? from - before : 0;
            const int64_t last = to - before < l->heads[i].rows ? to - before : l->heads[i].rows;
            multiply(&l->heads[i], &in, first, last, heads + before + first);
        }
#pragma omp barrier
        const int64_t shares = l->queries / l->keys, first_key = l->window && cache->tokens > l->window ? cache->tokens - l->window : 0;
        for (int64_t k = l->keys * me / all; k < l->keys * (me + 1) / all; k++) {
            float *queries = heads + k * shares * dim, *key = heads + (l->queries + k) * dim, *value = key + l->keys * dim;
            const int64_t at = (k * cache->head_stride + (cache->tokens - 1) * cache->token_stride) * size;
            for (int64_t q = 0; q < shares; q++) {
                if (l->query_norm) normalize(queries + q * dim, l->query_norm, l->query_epsilon, dim, queries + q * dim);
                rotate(queries + q * dim, angles, angles + dim, dim);
            }
            if (l->key_norm) normalize(key, l->key_norm, l->key_epsilon, dim, key);
            rotate(key, angles, angles + dim, dim);
            narrow(key, (int)halves, dim, (char *)cache->keys + at);
            narrow(value, (int)halves, dim, (char *)cache->values + at);
            attend(queries, shares, dim, cache, (int)halves, k, first_key, l->scaling, attended + k * shares * dim);
        }
#pragma omp barrier
        memcpy(in.numbers, attended, (size_t)(l->queries * dim) * sizeof(float));
        prepare(l->out.form, l->queries * dim, &in);
        for (int64_t at = part_of(l->hidden, me, all); at < part_of(l->hidden, me + 1, all); at += UNIT) {
            multiply(&l->out, &in, at, at + UNIT, part);
            widen((const char *)hidden + at * size, (int)halves, UNIT, part + UNIT);
            for (int64_t i = 0; i < UNIT; i++) middle[at + i] = part[i] + part[UNIT + i];
        }
#pragma omp barrier
        normalize(middle, l->behind, l->behind_epsilon, l->hidden, in.numbers);
        prepare(l->gated[0].form, l->hidden, &in);
        const int joined = l->gated_matrices == 1;
        for (int64_t at = part_of(l->inner, me, all); at < part_of(l->inner, me + 1, all); at += UNIT) {
            const int64_t up = joined ? l->inner + at : at;
            multiply(&l->gated[0], &in, at, at + UNIT, part);
            multiply(&l->gated[joined ? 0 : 1], &in, up, up + UNIT, part + UNIT);
            for (int64_t i = 0; i < UNIT; i++) gated[at + i] = silu(part[i]) * part[UNIT + i];
        }
#pragma omp barrier
        memcpy(in.numbers, gated, (size_t)l->inner * sizeof(float));
        prepare(l->down.form, l->inner, &in);
        for (int64_t at = part_of(l->hidden, me, all); at < part_of(l->hidden, me + 1, all); at += UNIT) {
            multiply(&l->down, &in, at, at + UNIT, part);
            for (int64_t i = 0; i < UNIT; i++) part[i] += middle[at + i];
            narrow(part, (int)halves, UNIT, (char *)result + at * size);
        }
    }
}

/* Decoder layers of the Llama family for few tokens, each a single call during which weights are
 * read nearly all the time; and products alone. What Python calls is at the end: `few_rows.py` and `few_rows_layers.py`
 * have the same fields. Compiled on the machine that runs it (`compiling.py`), so that the compiler chooses the
 * instructions. */

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

/* Keys and values of neighbouring tokens, by slot [heads][tokens][dim]. */
typedef struct {
    char *first; /* of the first token in slot 0 */
    int64_t slot_bytes, head_bytes, token_bytes, tokens;
} run;

/* One row's. */
typedef struct {
    const run *runs;
    int64_t count, tokens; /* of all runs, of which the last token is the row's own */
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

/* Tokens [start, start + tokens) of one slot and head, widened. */
static void widen_tile(const run *from, int64_t slot, int64_t head, int64_t start, int64_t tokens, int halves,
                       int64_t dim, float *tile) {
    const char *at = from->first + slot * from->slot_bytes + head * from->head_bytes + start * from->token_bytes;
    for (int64_t t = 0; t < tokens; t++) widen(at + t * from->token_bytes, halves, dim, tile + t * dim);
}

/* The queries [count][dim] of one key head over its keys and values, which are in `slot` and the next one: softmax in
 * tiles (Dao et al. 2022). */
static void attend(const float *queries, int64_t count, int64_t dim, const context *cache, int64_t slot, int halves,
                   int64_t head, int64_t window, float scaling, float *result) {
    float scores[MOST_QUERIES][TILE], largest[MOST_QUERIES], weight[MOST_QUERIES], tile[TILE * MOST_DIM];
    for (int64_t q = 0; q < count; q++) largest[q] = -INFINITY, weight[q] = 0;
    memset(result, 0, (size_t)(count * dim) * sizeof(float));
    int64_t passed = window && cache->tokens > window ? cache->tokens - window : 0;
    for (const run *from = cache->runs; from < cache->runs + cache->count; from++) {
        for (int64_t start = passed < from->tokens ? passed : from->tokens; start < from->tokens; start += TILE) {
            const int64_t tokens = from->tokens - start < TILE ? from->tokens - start : TILE;
            widen_tile(from, slot, head, start, tokens, halves, dim, tile);
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
            widen_tile(from, slot + 1, head, start, tokens, halves, dim, tile);
            for (int64_t q = 0; q < count; q++)
                for (int64_t i = 0; i < dim; i += LANES) {
                    floats sum = *(floats *)(result + q * dim + i);
                    for (int64_t t = 0; t < tokens; t++) sum += *(const floats *)(tile + t * dim + i) * scores[q][t];
                    *(floats *)(result + q * dim + i) = sum;
                }
        }
        passed -= passed < from->tokens ? passed : from->tokens;
    }
    for (int64_t q = 0; q < count; q++)
        for (int64_t i = 0; i < dim; i++) result[q * dim + i] /= weight[q];
}

/* One key head of one row: norms, rotary positions, the new key and value to their places. `heads` are the row's queries,
 * keys and values, `cosines` and `sines` its angles'. */
static void store_head(const layer *l, float *heads, int64_t k, const float *cosines, const float *sines,
                       const context *cache, int64_t slot, int halves) {
    const int64_t dim = l->dim, shares = l->queries / l->keys;
    float *queries = heads + k * shares * dim, *key = heads + (l->queries + k) * dim, *value = key + l->keys * dim;
    for (int64_t q = 0; q < shares; q++) {
        if (l->query_norm) normalize(queries + q * dim, l->query_norm, l->query_epsilon, dim, queries + q * dim);
        rotate(queries + q * dim, cosines, sines, dim);
    }
    if (l->key_norm) normalize(key, l->key_norm, l->key_epsilon, dim, key);
    rotate(key, cosines, sines, dim);
    const run *last = cache->runs + cache->count - 1;
    char *own = last->first + slot * last->slot_bytes + k * last->head_bytes + (last->tokens - 1) * last->token_bytes;
    narrow(key, halves, dim, own);
    narrow(value, halves, dim, own + last->slot_bytes);
}

/* What the queries of a key head of one row attend to, once all that they see is stored. */
static void attend_head(const layer *l, const float *heads, int64_t k, const context *cache, int64_t slot, int halves,
                        float *attended) {
    const int64_t dim = l->dim, shares = l->queries / l->keys, first = k * shares * dim;
    attend(heads + first, shares, dim, cache, slot, halves, k, l->window, l->scaling, attended + first);
}

/* Which forms can be multiplied here, a bit for each. */
int64_t few_rows_forms(void) {
    int64_t forms = 1 << FLOAT_PANELS | 1 << HALF_PANELS | 1 << FLOAT_ROWS | 1 << HALF_ROWS;
    if (HAS_VECTORS_OF_BYTES) forms |= 1 << BYTE_PANELS;
    if (HAS_PRODUCTS_OF_HALVES) forms |= 1 << NF4_PANELS;
    return forms;
}

/* How many rows it takes. */
int64_t few_rows_most(void) { return MOST_ROWS; }

/* Floats of scratch that each row and each thread needs for inputs of up to so many numbers. */
int64_t few_rows_scratch(int64_t most) { return scratch_floats(most); }

/* One thread of several that work on the same rows. */
typedef struct {
    int64_t me, all, rows;
    input *in; /* of all rows, shared; of a single one its own, so that it waits for nobody */
} worker;

static worker worker_of(int64_t rows, input *shared, input *own, float *scratch, int64_t most) {
    const worker w = {omp_get_thread_num(), omp_get_num_threads(), rows, rows > 1 ? shared : own};
    if (rows == 1) inputs_in(scratch + w.me * scratch_floats(most), most, 1, own);
    return w;
}

/* The rows that a thread prepares: of several a part, a single one for itself. */
#define OWN_ROWS(w, r) int64_t r = (w)->rows > 1 ? (w)->me : 0; r < (w)->rows; r += (w)->rows > 1 ? (w)->all : 1

/* Prepares the rows. */
static void prepared(const worker *w, int64_t form, int64_t columns) {
    for (OWN_ROWS(w, r)) prepare(form, columns, w->in + r);
    if (w->rows == 1) return;
#pragma omp barrier
}

/* Few rows times the transposed matrix: [rows][columns] to [rows][outputs], both bfloat16 if `halves`, else float.
 * `scratch`: as `few_rows_scratch` says for each thread or row, whatever there are more of. */
void few_rows_product(const matrix *m, int64_t rows, const void *from, int64_t halves, void *result, float *scratch,
                      int64_t threads) {
    const int64_t size = halves ? 2 : 4;
    input shared[MOST_ROWS];
    inputs_in(scratch, m->columns, rows, shared);
#pragma omp parallel num_threads(threads)
    {
        input own;
        float part[MOST_ROWS][UNIT];
        const worker w = worker_of(rows, shared, &own, scratch, m->columns);
        for (OWN_ROWS(&w, r))
            widen((const char *)from + r * m->columns * size, (int)halves, m->columns, w.in[r].numbers);
        prepared(&w, m->form, m->columns);
        for (int64_t at = part_of(m->rows, w.me, w.all); at < part_of(m->rows, w.me + 1, w.all); at += UNIT) {
            multiply(m, w.in, rows, at, at + UNIT, part[0], UNIT);
            for (int64_t r = 0; r < rows; r++)
                narrow(part[r], (int)halves, UNIT, (char *)result + (r * m->rows + at) * size);
        }
    }
}

/* What lies between the products of a layer, by row. */
typedef struct {
    float *heads, *attended, *middle, *gated;
    int64_t every; /* numbers of a row's queries, keys and values */
} between;

/* Queries, keys and values of normalized rows. */
static void multiply_heads(const layer *l, const worker *w, const between *b) {
    const int64_t from = part_of(b->every, w->me, w->all), to = part_of(b->every, w->me + 1, w->all);
    for (int64_t i = 0, before = 0; i < l->head_matrices; before += l->heads[i++].rows) {
        const int64_t first = from > before ? from - before : 0;
        const int64_t last = to - before < l->heads[i].rows ? to - before : l->heads[i].rows;
        multiply(&l->heads[i], w->in, w->rows, first, last, b->heads + before + first, b->every);
    }
}

static void store(const layer *l, const worker *w, const between *b, const float *angles, const context *caches,
                  int64_t r, int64_t k, int64_t slot, int halves) {
    const float *cosines = angles + r * l->dim, *sines = cosines + w->rows * l->dim;
    store_head(l, b->heads + r * b->every, k, cosines, sines, caches + r, slot, halves);
}

/* Every key head of every row, divided among threads by how many tokens they attend to. A row may see others of its
 * session, so all of several are stored before. */
static void attend_rows(const layer *l, const worker *w, const between *b, const float *angles, const context *caches,
                        int64_t slot, int halves) {
    const int64_t dim = l->dim;
    int64_t before = 0, every = 0;
    if (w->rows > 1) {
        for (int64_t i = w->me; i < w->rows * l->keys; i += w->all)
            store(l, w, b, angles, caches, i / l->keys, i % l->keys, slot, halves);
#pragma omp barrier
    }
    for (int64_t r = 0; r < w->rows; r++) every += l->keys * caches[r].tokens;
    for (int64_t r = 0; r < w->rows; r++)
        for (int64_t k = 0; k < l->keys; k++, before += caches[r].tokens)
            if ((before + caches[r].tokens / 2) * w->all / every == w->me) {
                if (w->rows == 1) store(l, w, b, angles, caches, r, k, slot, halves);
                attend_head(l, b->heads + r * b->every, k, caches + r, slot, halves,
                            b->attended + r * l->queries * dim);
            }
}

/* The rows' numbers are those that lie one row behind the other. */
static void take(const worker *w, const matrix *m, const float *from) {
    for (OWN_ROWS(w, r)) memcpy(w->in[r].numbers, from + r * m->columns, (size_t)m->columns * sizeof(float));
    prepared(w, m->form, m->columns);
}

/* The activations of the feed-forward network's middle. */
static void multiply_gated(const layer *l, const worker *w, const between *b) {
    float part[2][MOST_ROWS][UNIT];
    const int joined = l->gated_matrices == 1;
    for (int64_t at = part_of(l->inner, w->me, w->all); at < part_of(l->inner, w->me + 1, w->all); at += UNIT) {
        const int64_t up = joined ? l->inner + at : at;
        multiply(&l->gated[0], w->in, w->rows, at, at + UNIT, part[0][0], UNIT);
        multiply(&l->gated[joined ? 0 : 1], w->in, w->rows, up, up + UNIT, part[1][0], UNIT);
        for (int64_t r = 0; r < w->rows; r++)
            for (int64_t i = 0; i < UNIT; i++)
                b->gated[r * l->inner + at + i] = silu(part[0][r][i]) * part[1][r][i];
    }
}

/* A decoder layer on the hidden states of rows, [rows][hidden] to `result`; keys and values become the last of each
 * row's context, in `slot` and the next one. Rows of one session stand one behind the other, each with one token more. `angles` are cosines and sines [2][rows][dim]. `shared` has
 * room for (queries + 2 keys) * dim + queries * dim + hidden + inner floats of each row, `scratch` for what
 * `few_rows_scratch(most)` says for each thread or row, whatever there are more of. */
void few_rows_layer(const layer *l, int64_t rows, const void *hidden, const float *angles, const context *caches,
                    int64_t slot, int64_t halves, void *result, float *shared, float *scratch, int64_t most,
                    int64_t threads) {
    const int64_t size = halves ? 2 : 4, every = (l->queries + 2 * l->keys) * l->dim;
    float *attended = shared + rows * every, *middle = attended + rows * l->queries * l->dim;
    input inputs[MOST_ROWS];
    inputs_in(scratch, most, rows, inputs);
    const between b = {shared, attended, middle, middle + rows * l->hidden, every};
#pragma omp parallel num_threads(threads)
    {
        input own_input;
        float part[MOST_ROWS][UNIT], own[UNIT];
        const worker w = worker_of(rows, inputs, &own_input, scratch, most);
        const int64_t from = part_of(l->hidden, w.me, w.all), to = part_of(l->hidden, w.me + 1, w.all);

        for (OWN_ROWS(&w, r)) {
            widen((const char *)hidden + r * l->hidden * size, (int)halves, l->hidden, w.in[r].numbers);
            normalize(w.in[r].numbers, l->before, l->before_epsilon, l->hidden, w.in[r].numbers);
        }
        prepared(&w, l->heads[0].form, l->hidden);
        multiply_heads(l, &w, &b);
#pragma omp barrier
        attend_rows(l, &w, &b, angles, caches, slot, (int)halves);
#pragma omp barrier
        take(&w, &l->out, b.attended);
        for (int64_t at = from; at < to; at += UNIT) {
            multiply(&l->out, w.in, rows, at, at + UNIT, part[0], UNIT);
            for (int64_t r = 0; r < rows; r++) {
                widen((const char *)hidden + (r * l->hidden + at) * size, (int)halves, UNIT, own);
                for (int64_t i = 0; i < UNIT; i++) b.middle[r * l->hidden + at + i] = part[r][i] + own[i];
            }
        }
#pragma omp barrier
        for (OWN_ROWS(&w, r))
            normalize(b.middle + r * l->hidden, l->behind, l->behind_epsilon, l->hidden, w.in[r].numbers);
        prepared(&w, l->gated[0].form, l->hidden);
        multiply_gated(l, &w, &b);
#pragma omp barrier
        take(&w, &l->down, b.gated);
        for (int64_t at = from; at < to; at += UNIT) {
            multiply(&l->down, w.in, rows, at, at + UNIT, part[0], UNIT);
            for (int64_t r = 0; r < rows; r++) {
                for (int64_t i = 0; i < UNIT; i++) part[r][i] += b.middle[r * l->hidden + at + i];
                narrow(part[r], (int)halves, UNIT, (char *)result + (r * l->hidden + at) * size);
            }
        }
    }
}

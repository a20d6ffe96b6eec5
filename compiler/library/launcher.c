/* The path of a call whose shapes were seen before: read the tensors, find the plan, put addresses
 * into a copy of its parameters, launch. Whatever it does not know it answers with NotImplemented,
 * and Python does the call. Built against no header of CPython, torch or CUDA: what is used of
 * CPython's stable ABI, of DLPack's exchange API (1.3) and of the driver's ABI is declared here.
 * The structures have their twins in native.py. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct _object PyObject;
typedef ptrdiff_t Py_ssize_t;
typedef PyObject *(*Fast)(PyObject *, PyObject *const *, Py_ssize_t);
typedef struct { const char *name; void *function; int flags; const char *doc; } PyMethodDef;
extern PyObject _Py_NoneStruct, _Py_NotImplementedStruct, PyFloat_Type, PyLong_Type;
extern PyObject *PyObject_Type(PyObject *), *PyObject_GetAttr(PyObject *, PyObject *);
extern PyObject *PyErr_Occurred(void);
extern PyObject *PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
extern PyObject *PyTuple_New(Py_ssize_t), *PyCapsule_New(void *, const char *, void (*)(PyObject *));
extern PyObject *PyCMethod_New(PyMethodDef *, PyObject *, PyObject *, PyObject *);
extern PyObject *PyLong_FromLong(long);
extern int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *), PyObject_IsTrue(PyObject *);
extern void *PyCapsule_GetPointer(PyObject *, const char *);
extern void Py_IncRef(PyObject *), Py_DecRef(PyObject *), PyErr_Clear(void);
extern void PyErr_SetString(PyObject *, const char *);
extern double PyFloat_AsDouble(PyObject *);
extern long PyLong_AsLongAndOverflow(PyObject *, int *);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);

enum { MAX_ARGS = 24, MAX_OUT = 4, MAX_PARAMS = 64, KEY_WORDS = 256, BLOCK_BYTES = 8192,
       SLOTS = 1024, PROBES = 4, ALIGNMENT = 16, METH_FASTCALL = 0x80 };

typedef struct {
    void *data;
    int32_t device_type, device;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct Managed { /* DLManagedTensorVersioned */
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct Managed *);
    uint64_t flags;
    DLTensor tensor;
} Managed;

typedef struct {
    uint32_t grid[3], block[3], smem_bytes;
    void *stream, *attributes;
    uint32_t attribute_count;
} Config;

typedef struct { uint32_t offset, source; uint64_t add; uint32_t replace, pad; } Patch;
typedef struct { uint32_t offset, arg; uint32_t floating, pad; } Scalar;
typedef struct { Config *config; void *function; uint32_t *params; uint64_t count; } Step;

typedef struct {
    PyObject *owner; /* what keeps all of this alive */
    void *context;
    const unsigned char *block;
    Patch *patches;
    Scalar *scalars;
    Step *steps;
    DLTensor *outputs; /* what to allocate: dtype, device and shape */
    DLTensor *workspace; /* the same, or NULL */
    uint64_t *spans; /* bytes of each argument, 0 for none */
    uint32_t block_bytes, patch_count, scalar_count, step_count;
    int32_t device, pad;
} Plan;

typedef struct {
    int (*allocate)(DLTensor *, Managed **, void *, void (*)(void *, const char *, const char *));
    int (*wrap)(Managed *, void **);
    int (*tensor)(void *, DLTensor *);
    int (*work_stream)(int32_t, int32_t, void **);
    int (*launch)(Config *, void *, void **, void **);
    int (*get_context)(void **);
    int (*push_context)(void *);
    int (*pop_context)(void **);
    int (*replace_address)(void *, void *);
    PyObject *tensor_type, *parameter_type, *requires_grad, *grad_enabled;
    PyObject *failed, *out_of_memory;
    uint32_t inputs, outputs;
    int32_t device_type, pad;
    uint64_t scalars; /* a bit for each input that is one */
} Setup;

typedef struct { uint32_t words; Plan *plan; uint64_t key[KEY_WORDS]; } Slot;
typedef struct { Setup setup; Slot *slots[SLOTS]; } State;

static const char NAME[] = "ptxflow.launcher";

/* 0 for a tensor's data address that the fast path takes, with its key's words written. */
static int read_tensor(const Setup *s, PyObject *arg, uint64_t *key, uint32_t *words,
                       uint64_t *pointer, int32_t *device)
{
    PyObject *type = PyObject_Type(arg);
    Py_DecRef(type); /* the object keeps it */
    if (type != s->tensor_type && type != s->parameter_type)
        return -1;
    PyObject *grad = PyObject_GetAttr(arg, s->requires_grad);
    int needs = grad ? PyObject_IsTrue(grad) : -1;
    if (grad)
        Py_DecRef(grad);
    if (needs > 0) {
        PyObject *on = PyObject_Vectorcall(s->grad_enabled, NULL, 0, NULL);
        needs = on ? PyObject_IsTrue(on) : -1;
        if (on)
            Py_DecRef(on);
    }
    DLTensor t;
    if (needs != 0 || s->tensor(arg, &t))
        return -1;
    *pointer = (uint64_t)(uintptr_t)t.data + t.byte_offset;
    if (*pointer % ALIGNMENT || t.device_type != s->device_type ||
        *words + 1 + 2 * (uint32_t)t.ndim > KEY_WORDS || (*device >= 0 && *device != t.device))
        return -1;
    *device = t.device;
    key[(*words)++] = 1 | (uint64_t)t.ndim << 8 | (uint64_t)t.code << 16 | (uint64_t)t.bits << 24 |
                      (uint64_t)t.lanes << 32;
    for (int32_t i = 0; i < t.ndim; i++) {
        key[(*words)++] = (uint64_t)t.shape[i];
        key[(*words)++] = (uint64_t)t.strides[i];
    }
    return 0;
}

/* The key of a call, or 0 where the fast path does not take an argument. */
static uint32_t read_call(const Setup *s, PyObject *const *args, Py_ssize_t n, uint64_t *key,
                          uint64_t *pointers)
{
    uint32_t words = 1;
    int32_t device = -1;
    if (n != s->inputs && n != s->inputs + s->outputs)
        return 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        pointers[i] = 0;
        if (args[i] == &_Py_NoneStruct) {
            if (words == KEY_WORDS)
                return 0;
            key[words++] = 0;
        } else if (i < s->inputs && s->scalars >> i & 1) {
            PyObject *type = PyObject_Type(args[i]);
            Py_DecRef(type);
            if (words == KEY_WORDS || (type != &PyFloat_Type && type != &PyLong_Type))
                return 0;
            key[words++] = type == &PyFloat_Type ? 2 : 3;
        } else if (read_tensor(s, args[i], key, &words, &pointers[i], &device)) {
            PyErr_Clear();
            return 0;
        }
    }
    key[0] = (uint64_t)n << 32 | (uint32_t)device;
    return words;
}

static Slot **slot_of(State *state, const uint64_t *key, uint32_t words, int free_one)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < words; i++)
        hash = (hash ^ key[i]) * 0x100000001b3u, hash ^= hash >> 29;
    for (uint32_t i = 0; i < PROBES; i++) {
        Slot **at = &state->slots[(hash + i) % SLOTS];
        if (*at ? (*at)->words == words && !memcmp((*at)->key, key, 8 * words) : free_one)
            return at;
    }
    return free_one ? &state->slots[hash % SLOTS] : NULL;
}

static int overlaps(const Setup *s, const Plan *p, const uint64_t *pointers)
{
    for (uint32_t o = s->inputs; o < s->inputs + s->outputs; o++)
        for (uint32_t i = 0; i < o; i++)
            if (pointers[i] && pointers[o] < pointers[i] + p->spans[i] &&
                pointers[i] < pointers[o] + p->spans[o])
                return 1;
    return 0;
}

/* Why torch allocates nothing, as a Python error. */
static void say(void *type, const char *kind, const char *message)
{
    (void)kind;
    PyErr_SetString(type, message);
}

/* Fresh memory of torch's, with its address. */
static Managed *allocate(const Setup *s, DLTensor *like, uint64_t *pointer)
{
    Managed *made = NULL;
    if (s->allocate(like, &made, s->out_of_memory, say))
        return NULL;
    *pointer = (uint64_t)(uintptr_t)made->tensor.data + made->tensor.byte_offset;
    return made;
}

/* A fresh tensor, with its address. */
static PyObject *output(const Setup *s, DLTensor *like, uint64_t *pointer)
{
    void *tensor = NULL;
    Managed *made = allocate(s, like, pointer);
    return made && !s->wrap(made, &tensor) ? tensor : NULL;
}

static int put(const Setup *s, const Plan *p, unsigned char *block, const uint64_t *pointers,
               PyObject *const *args)
{
    memcpy(block, p->block, p->block_bytes);
    for (uint32_t i = 0; i < p->patch_count; i++) {
        const Patch *q = &p->patches[i];
        uint64_t address = pointers[q->source] ? pointers[q->source] + q->add : 0;
        if (!q->replace)
            memcpy(block + q->offset, &address, 8);
        else if (s->replace_address(block + q->offset, (void *)(uintptr_t)address))
            return -1;
    }
    for (uint32_t i = 0; i < p->scalar_count; i++) {
        const Scalar *q = &p->scalars[i];
        PyObject *arg = args[q->arg];
        if (arg == &_Py_NoneStruct) {
            memset(block + q->offset, 0, 4);
        } else if (q->floating) {
            float value = (float)PyFloat_AsDouble(arg);
            if (value == -1 && PyErr_Occurred()) { /* an integer beyond floating point */
                PyErr_Clear();
                return -1;
            }
            memcpy(block + q->offset, &value, 4);
        } else {
            int over = 0;
            long wide = PyLong_AsLongAndOverflow(arg, &over);
            int32_t value = (int32_t)wide;
            if (over || value != wide)
                return -1;
            memcpy(block + q->offset, &value, 4);
        }
    }
    return 0;
}

/* Called without the interpreter's lock. Returns the driver's code. */
static int run(const Setup *s, const Plan *p, unsigned char *block, void *stream)
{
    void *current = NULL, *params[MAX_PARAMS];
    int code = s->get_context(&current), pushed = 0;
    if (!code && current != p->context) {
        code = s->push_context(p->context);
        pushed = !code;
    }
    for (uint32_t i = 0; i < p->step_count && !code; i++) {
        const Step *step = &p->steps[i];
        Config config = *step->config;
        config.stream = stream;
        for (uint64_t k = 0; k < step->count; k++)
            params[k] = block + step->params[k];
        code = s->launch(&config, step->function, params, NULL);
    }
    if (pushed)
        s->pop_context(&current);
    return code;
}

static PyObject *answer(const Setup *s, PyObject *const *out)
{
    if (s->outputs == 1) {
        Py_IncRef(out[0]);
        return out[0];
    }
    PyObject *all = PyTuple_New(s->outputs);
    for (uint32_t i = 0; all && i < s->outputs; i++) {
        Py_IncRef(out[i]);
        PyTuple_SetItem(all, i, out[i]);
    }
    return all;
}

static PyObject *unknown(void)
{
    Py_IncRef(&_Py_NotImplementedStruct);
    return &_Py_NotImplementedStruct;
}

static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    State *state = PyCapsule_GetPointer(self, NAME);
    const Setup *s = &state->setup;
    _Alignas(128) unsigned char block[BLOCK_BYTES];
    uint64_t key[KEY_WORDS], pointers[MAX_ARGS + 1];
    PyObject *made[MAX_OUT] = {0}, *result = NULL;
    Managed *room = NULL;
    uint32_t words = read_call(s, args, n, key, pointers), given = n > s->inputs;
    Slot **at = words ? slot_of(state, key, words, 0) : NULL;
    if (!at || (given && overlaps(s, (*at)->plan, pointers)))
        return unknown();
    const Plan *p = (*at)->plan;
    PyObject *owner = p->owner;
    Py_IncRef(owner);
    for (uint32_t i = 0; !given && i < s->outputs; i++)
        if (!(made[i] = output(s, p->outputs + i, &pointers[s->inputs + i])))
            goto done;
    if (p->workspace && !(room = allocate(s, p->workspace, &pointers[s->inputs + s->outputs])))
        goto done;
    void *stream = NULL;
    if (s->work_stream(s->device_type, p->device, &stream))
        goto done;
    if (put(s, p, block, pointers, args)) {
        result = unknown();
        goto done;
    }
    void *thread = PyEval_SaveThread();
    int code = run(s, p, block, stream);
    PyEval_RestoreThread(thread);
    if (code) {
        PyObject *number = PyLong_FromLong(code);
        PyObject *fails[] = {number, owner};
        result = PyObject_Vectorcall(s->failed, fails, 2, NULL); /* raises */
        Py_DecRef(number);
    } else {
        result = answer(s, given ? args + s->inputs : (PyObject *const *)made);
    }
done:
    for (uint32_t i = 0; i < MAX_OUT; i++)
        if (made[i])
            Py_DecRef(made[i]);
    if (room)
        room->deleter(room);
    Py_DecRef(owner);
    return result;
}

static void drop(Slot **at)
{
    if (*at) {
        Py_DecRef((*at)->plan->owner);
        free(*at);
        *at = NULL;
    }
}

/* Keep a plan for calls like this one. `capsule` is what `create` was given; 0 if it is kept. */
int insert(PyObject *capsule, PyObject *const *args, Py_ssize_t n, Plan *plan)
{
    State *state = PyCapsule_GetPointer(capsule, NAME);
    uint64_t key[KEY_WORDS], pointers[MAX_ARGS + 1];
    uint32_t words = read_call(&state->setup, args, n, key, pointers);
    Slot *made = words ? malloc(sizeof *made) : NULL;
    if (!made)
        return -1;
    made->words = words;
    made->plan = plan;
    memcpy(made->key, key, 8 * words);
    Py_IncRef(plan->owner);
    Slot **at = slot_of(state, key, words, 1);
    drop(at);
    *at = made;
    return 0;
}

static void destroy(PyObject *capsule)
{
    State *state = PyCapsule_GetPointer(capsule, NAME);
    for (uint32_t i = 0; i < SLOTS; i++)
        drop(&state->slots[i]);
    free(state);
}

/* A capsule that holds the plans of a library; what `setup` points to must outlive it. */
PyObject *create(const Setup *setup)
{
    State *state = calloc(1, sizeof *state);
    if (!state)
        return unknown();
    state->setup = *setup;
    return PyCapsule_New(state, NAME, destroy);
}

/* The function that Python calls. */
PyObject *function(PyObject *capsule)
{
    static PyMethodDef method = {"call", (void *)call, METH_FASTCALL, NULL};
    return PyCMethod_New(&method, capsule, NULL, NULL);
}

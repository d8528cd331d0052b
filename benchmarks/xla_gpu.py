"""What XLA's compiler for NVIDIA GPUs makes of the programs of this library, on a machine without a GPU.

    python benchmarks/xla_gpu.py setup             makes .venv-xla, which compiles
    python benchmarks/xla_gpu.py record [CARD …]   compiles all programs of the released model
    python benchmarks/xla_gpu.py memory [CARD …]   plans the memory of its step at several batch sizes
    python benchmarks/xla_gpu.py step [CARD …]     counts kernels and bytes of a short step
    python benchmarks/xla_gpu.py small [CARD …]    compiles small programs and prints what it finds

`record`, `memory` and `step` write a record for each card into benchmarks/, after each program. A program
that the newest record of the card holds is not compiled again, unless --anew is given, so a run that was cut
off goes on. They end each program with XLA's plan of its memory; `small` goes on to machine code.

Run it by the Python of .venv. Two environments, since TensorFlow and JAX pin other versions of the same
wheels: TensorFlow writes a program as StableHLO, and the CUDA plugin of JAX compiles it for an H100, H200 or
RTX 4090, without a driver, cuBLAS or cuDNN. jaxlib 0.9.0 has nearly the flags of the XLA in TensorFlow 2.21.

Nothing is autotuned: products and convolutions become calls of cuBLAS and cuDNN. A real card may choose other
kernels, which changes their number and the temporary memory. The memory is XLA's own plan of a program,
without the CUDA context, the workspaces of libraries, and what other programs hold."""
import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / 'benchmarks'
PYTHON = ROOT / '.venv-xla/bin/python'
JAX = '0.9.0'
PACKAGES = [*(f'{name}=={JAX}' for name in ('jax', 'jaxlib', 'jax-cuda12-plugin', 'jax-cuda12-pjrt')),
            'nvidia-cuda-nvcc-cu12==12.9.86', 'numpy', 'scipy', 'ml_dtypes', 'opt_einsum']


def is_ready() -> bool:
    "Whether .venv-xla can compile."
    if not PYTHON.exists(): return False
    command = [PYTHON, '-c', 'import jax, jax_cuda12_plugin, nvidia']
    return not subprocess.run(command, capture_output=True).returncode


def setup():
    "Make .venv-xla, 1.1 GB, once; raises `CalledProcessError` where pip does not find the wheels."
    if is_ready(): return
    subprocess.run([sys.executable, '-m', 'venv', '--clear', PYTHON.parents[1]], check=True)
    # without the CUDA libraries that the plugin asks for: nothing is run
    subprocess.run([PYTHON, '-m', 'pip', 'install', '--quiet', '--no-deps', *PACKAGES], check=True)


# --- the programs, by TensorFlow ------------------------------------------------------------------

STEPS = {   # settings of the training section
    'float32': {}, 'bfloat16': {'precision': 'bfloat16'}, 'float16': {'precision': 'float16'},
    'accumulation': {'precision': 'bfloat16', 'grad_accum_steps': 2},
    'checkpointing': {'precision': 'bfloat16', 'gradient_checkpointing': True},
    'lora': {'precision': 'bfloat16', 'finetune': 'lora'}}
OWN_UPDATE = 'bfloat16', 'float16', 'lora'   # the others have that of bfloat16
TEXT, CODES = 200, 250                      # tokens and codes of a long clip


def settings(one: dict):
    "The released model, or a small one."
    from xtts_nb.config import XTTSConfig
    if one.get('small'):
        return XTTSConfig.tiny(64).replace(
            model={'gpt': {'num_layers': 2, 'num_heads': 4}}, data={'batch_size': 4, 'reference_frames': 32},
            training={'decoder': {'batch_size': 2, 'window': 4}})
    names = {'num_layers': 'layers', 'conditioning_layers': 'conditioning'}
    layers = {key: one[name] for key, name in names.items() if name in one}
    return XTTSConfig.xtts_v2().replace(model={'gpt': layers}, data={'batch_size': one.get('rows', 8)})


def step_programs(config, text: int, codes: int) -> dict:   # name -> (function, arguments)
    "A training step, and both halves of it."
    import tensorflow as tf
    from xtts_nb.models.gpt import GPT
    from xtts_nb.models.xtts import POLICIES
    from xtts_nb.train.finetune import make_update
    from xtts_nb.train.step import random_batch, token_counts
    update = make_update(GPT(config, 5, dtype=POLICIES[config.training.gpt.precision]), config.training.gpt)

    def gradients(batch, number):
        counts = token_counts(update.gpt, batch)
        return *update.gradients(batch, number, counts), counts

    given = random_batch(config, text, codes), tf.constant(0)
    found = tf.function(gradients).get_concrete_function(*given).structured_outputs
    return {'gradients': (gradients, given), 'update': (update.finish, found), 'step': (update, given)}


def evaluation(config, batch):
    from xtts_nb.models.gpt import GPT
    from xtts_nb.train.step import token_losses
    gpt = GPT(config, 5, dtype='mixed_bfloat16')
    return lambda batch: token_losses(gpt, batch), (batch,)


def data_stage(config, batch):
    "Mels and codes of samples, as the data device makes them."
    import tensorflow as tf
    from xtts_nb.models.dvae import DVAE
    from xtts_nb.train.dual import finish_batch
    rows, most, audio = len(batch['clip']), config.data.reference_frames, config.model.audio
    codes = batch['codes'].shape[1]
    frames, dvae = config.model.dvae.frames_per_code * codes, DVAE(config)
    wav = lambda n, n_fft: tf.zeros([rows, (n - 1) * audio.hop_length + n_fft], tf.int16)
    count = lambda n: tf.fill([rows], tf.constant(n, tf.int64))
    sounds = {'wav': wav(frames, audio.dvae_n_fft), 'mel_length': count(frames),
              'reference_wav': wav(most, audio.reference_n_fft), 'reference_length': count(most),
              'coded': tf.fill([rows, codes], True)}
    return lambda batch: finish_batch(batch, dvae, config), (batch | sounds,)


def speech(config, _):
    "128 codes of one text, as `speech.generate` makes them."
    import tensorflow as tf
    from xtts_nb.models.gpt import GPT
    from xtts_nb.speech.generate import generate
    gpt = GPT(config, 5, dtype='mixed_bfloat16')
    prompt = tf.zeros([1, gpt.cfg.prompt_latents, gpt.cfg.hidden_dim])
    return (lambda text, length, prompt: generate(gpt, text, length, prompt, 128),
            (tf.zeros([1, 64], tf.int32), tf.fill([1], 50), prompt))


def hifigan(config, _):
    "The sound of 128 codes."
    import tensorflow as tf
    from xtts_nb.models.hifigan import HiFiGAN
    model = config.model
    return HiFiGAN(config), (tf.zeros([1, 128, model.gpt.hidden_dim]), tf.zeros([1, model.speaker.width]))


def dvae_step(config, _):
    import tensorflow as tf
    from xtts_nb.models.dvae import DVAE
    from xtts_nb.train.parts import _DVAEUpdate
    mel = tf.zeros([config.training.dvae.batch_size, 64, config.model.audio.n_mels])
    return _DVAEUpdate(DVAE(config), config.training.dvae), ({'mel': mel}, tf.constant(0))


def decoder_step(config, _):
    "HiFi-GAN, its critics and the speaker encoder."
    import tensorflow as tf
    from xtts_nb.models.hifigan import HiFiGAN, SpeakerEncoder
    from xtts_nb.train.parts import _DecoderUpdate, _window_samples
    voice, speaker, B = config.training.decoder, config.model.speaker, config.training.decoder.batch_size
    frames = int(voice.reference_seconds * speaker.sample_rate / speaker.hop_length)
    batch = {'states': tf.zeros([B, voice.window, config.model.gpt.hidden_dim], tf.float16),
             'wav': tf.zeros([B, _window_samples(config)], tf.int16),
             'voice': tf.zeros([B, frames, speaker.n_mels], tf.float16)}
    return _DecoderUpdate(HiFiGAN(config), SpeakerEncoder(config), True, config), (batch, tf.constant(0))


OTHERS = {f.__name__.replace('_', ' '): f
          for f in (evaluation, data_stage, speech, hifigan, dvae_step, decoder_step)}


def stablehlo(f, given: tuple) -> bytes:
    "A function as XLA gets it, for arguments of these shapes."
    import tensorflow as tf
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in tf.nest.flatten(given)]
    flat = tf.function(lambda *flat: f(*tf.nest.pack_sequence_as(given, flat)), jit_compile=True)
    return flat.experimental_get_compiler_ir(*specs)(stage='stablehlo_serialized')


def write(folder: str, wanted: list[dict]):
    "Write the StableHLO of the programs that are asked for, as by `requests`."
    os.environ |= {'CUDA_VISIBLE_DEVICES': '-1', 'TF_CPP_MIN_LOG_LEVEL': '2'}
    sys.path.insert(0, str(ROOT))
    from xtts_nb.config import setup_tf
    setup_tf()
    import keras
    from xtts_nb.train.step import random_batch
    for one in wanted:
        name, config = one['name'], settings(one)
        lengths = (20, 30) if one.get('small') else (
            one.get('text', TEXT), one.get('codes', CODES))
        if name in OTHERS: programs = {name: OTHERS[name](config, random_batch(config, *lengths))}
        else:
            training = one.get('training') or STEPS[name]
            made = step_programs(config.replace(training={'gpt': training}), *lengths)
            programs = {f'{part}, {name}': made[part] for part in one['parts']}
        for each, program in programs.items():
            part = Path(folder, f'{each}.part')
            part.write_bytes(stablehlo(*program))
            part.rename(part.with_suffix('.mlir'))
        keras.backend.clear_session()


# --- compiling, by JAX ----------------------------------------------------------------------------

# the numbers of openxla/xla, xla/backends/gpu/target_config/specs; those of the 4090 from its data sheet
HOPPER = dict(major=9, minor=0, cores=132, l2=52428800, clock=1.98, per_core=233472, optin=232448,
              threads=2048)
CARDS = {
    'h100': dict(HOPPER, name='NVIDIA H100', bandwidth=3352320000000, memory=84942979072),
    'h200': dict(HOPPER, name='NVIDIA H200', bandwidth=4800000000000, memory=151397597184),
    'rtx4090': dict(name='NVIDIA GeForce RTX 4090', major=8, minor=9, cores=128, bandwidth=1008000000000,
                    l2=75497472, clock=2.52, memory=25390809088, per_core=102400, optin=101376, threads=1536)}


def target(card: str) -> str:
    "A card as text of XLA's GpuTargetConfigProto."
    c = CARDS[card]
    extension = 'feature_extension: ACCELERATED_FEATURES' if c['major'] == 9 else ''
    return f'''gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: {c["per_core"]}
  threads_per_core_limit: {c["threads"]}
  core_count: {c["cores"]} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {c["bandwidth"]} l2_cache_size: {c["l2"]} clock_rate_ghz: {c["clock"]}
  device_memory_size: {c["memory"]} shared_memory_per_block_optin: {c["optin"]}
  cuda_compute_capability {{ major: {c["major"]} minor: {c["minor"]} {extension} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA" device_description_str: "{c["name"]}"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}'''


def compiler(card: str, dump: Path):   # a function of a StableHLO module
    "XLA's compiler for a card; it writes what it makes into a folder."
    nvcc = Path(importlib.util.find_spec('nvidia').submodule_search_locations[0]) / 'cuda_nvcc'
    # untuned, Triton picks tiles that it then refuses
    flags = [f'--xla_gpu_cuda_data_dir={nvcc}', '--xla_gpu_enable_triton_gemm=false',
             f'--xla_dump_to={dump}', '--xla_dump_hlo_as_text']
    os.environ |= {'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1',   # else the plugin is refused without libcudart
                   'TF_CPP_MIN_LOG_LEVEL': '2', 'PATH': f'{nvcc}/bin:{os.environ["PATH"]}',
                   'XLA_FLAGS': ' '.join(flags)}
    import numpy as np
    from jax._src.lib import _jax, xla_client
    from jax.experimental import topologies
    described = topologies.get_topology_desc(platform='cuda', target_config=target(card), topology='1x1x1')
    devices, options = tuple(described.devices), xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.zeros((1, 1), 'int32'))
    return lambda module: devices[0].client.compile(module, _jax.DeviceList(devices), options)


def compile_program(card: str, path: Path, only_plan: bool, buffers: str = ''):
    "Compile a program for a card and print a JSON line; `only_plan` ends it with the plan of the memory."
    with tempfile.TemporaryDirectory() as dump:
        compiled = compiler(card, dump := Path(dump))
        from jax._src.interpreters import mlir
        from jax._src.lib.mlir import ir
        from jax.errors import JaxRuntimeError
        with mlir.make_ir_context() as context:
            context.allow_unregistered_dialects = True
            module = ir.Module.parse(path.read_bytes())
            row, start = {'name': path.stem, **before(module)}, time.time()
            ended = threading.Thread(target=end_with_plan, args=(row, dump, start, buffers), daemon=True)
            if only_plan: ended.start()
            try: made = compiled(module)
            except JaxRuntimeError as e: row['refused'] = str(e).splitlines()[0]
            else:
                row |= {'refused': None, 'seconds': round(time.time() - start, 1)}
                row |= memory(made) | after(dump)
        print(json.dumps(row), flush=True)


def before(module) -> dict:
    "What a module holds; copies of TensorFlow's own, which the plugin does not take, are removed."
    from jax._src.lib.mlir import ir
    copies, seen = [], Counter()

    def visit(op):
        seen[op.name] += 1
        if op.name == 'mhlo.copy':
            op.results[0].replace_all_uses_with(op.operands[0])
            copies.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for op in copies: op.erase()
    return {'ops': seen.total(), 'conditionals': seen['stablehlo.if'] + seen['stablehlo.case'],
            'loops': seen['stablehlo.while']}


def memory(made) -> dict:
    "XLA's plan of the memory of a program, in bytes."
    stats, names = made.get_compiled_memory_stats(), ('argument', 'output', 'alias', 'temp')
    arguments, results, in_place, temporary = (getattr(stats, f'{n}_size_in_bytes') for n in names)
    return {'arguments': arguments, 'results': results, 'in_place': in_place, 'temporary': temporary,
            'peak': arguments + results - in_place + temporary}


def end_with_plan(row: dict, dump: Path, start: float, buffers: str):
    "End the process once the memory is planned; the machine code takes as long again."
    while not (*dump.glob('*memory-usage-report.txt'),): time.sleep(0.1)   # written after the plan
    row |= {'refused': None, 'seconds': round(time.time() - start, 1)}
    listed = next(dump.glob('*buffer-assignment.txt'))
    row |= plan(listed.read_text()) | after(dump)
    if buffers: shutil.copy(listed, Path(buffers, f'{row["name"]}.txt'))
    shutil.rmtree(dump, ignore_errors=True)
    print(json.dumps(row), flush=True)
    os._exit(0)


def plan(text: str) -> dict:
    "The same as `memory`, from XLA's list of buffers."
    words = {'arguments': 'parameter ', 'results': 'maybe-live-out', 'temporary': 'preallocated-temp'}
    total = Counter()
    for size, what in re.findall(r'^allocation \d+: size (\d+)(.*)', text, re.M):
        kinds = [kind for kind, word in words.items() if word in what]
        if len(kinds) > 1: total['in_place'] += int(size)
        for kind in kinds: total[kind] += int(size)
        if kinds: total['peak'] += int(size)
    return {name: total[name] for name in ('arguments', 'results', 'in_place', 'temporary', 'peak')}


def after(dump: Path) -> dict:
    "What is left of a program, from its optimised HLO: each of these is started by the host."
    return started(next(dump.glob('*gpu_after_optimizations.txt')).read_text())


CALLS = re.compile(r'custom_call_target="__(cublas|cudnn)')


def started(text: str) -> dict:
    "Counts of an optimised HLO module; a fusion is a kernel."
    kinds = 'fusion|sort|fft|while|conditional|copy'
    kinds = Counter(re.findall(rf'^ +(?:ROOT )?%\S+ = .*? ({kinds})\(', text, re.M))
    loops = [line for line in text.splitlines() if ' while(' in line]
    calls = len(CALLS.findall(text)) + kinds['fft']
    return {'kernels': kinds['fusion'] + kinds['sort'], 'library_calls': calls,
            'copies': kinds['copy'], 'host_conditionals': kinds['conditional'], 'host_loops': kinds['while'],
            'known_turns': sum('known_trip_count' in line for line in loops),
            'rematerialised': len(re.findall(r'^ +(?:ROOT )?%\S*\.remat\S* = ', text, re.M)), **moved(text)}


SIZES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'u64': 8}


def size(shapes: str) -> int:
    "Bytes of the arrays that an HLO shape or tuple of shapes names."
    found = re.findall(r'\b([a-z]+\d*)\[([\d,]*)\]', shapes)
    return sum(SIZES.get(kind, 0) * math.prod(int(n) for n in dims.split(',') if n) for kind, dims in found)


def moved(text: str) -> dict:
    "Bytes that kernels read and write, each operand once: those of library calls, and all others."
    sizes, total = {}, Counter(moved_by_calls=0, moved_by_kernels=0)
    for line in text[text.index('\nENTRY'):].splitlines():
        if not (m := re.match(r' +(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*?)\)', line)): continue
        name, made, op, operands = m.groups()
        sizes[name] = size(made)
        if op not in ('fusion', 'sort', 'copy', 'custom-call'): continue
        read = sum(sizes.get(o, 0) for o in {*re.findall(r'%([\w.-]+)', operands)})
        total['moved_by_calls' if CALLS.search(line) else 'moved_by_kernels'] += read + sizes[name]
    return total


# --- what is asked for ----------------------------------------------------------------------------

def requests(small: bool) -> list[dict]:
    "Every program once."
    parts = lambda name: ['gradients', *['update'] * (name in OWN_UPDATE)]
    return [{'name': name, 'parts': parts(name), 'small': small} for name in STEPS] + [
        {'name': name, 'small': small} for name in OTHERS]


ASKED = 'layers', 'conditioning', 'rows', 'text', 'codes', 'training'   # of a request, kept in the row
KEPT = {'all kept': {}, 'checkpointing': {'gradient_checkpointing': True}, 'lora': {'finetune': 'lora'},
        'float32': {'precision': 'float32'}, 'float16': {'precision': 'float16'}}   # bfloat16 if unnamed


def memory_requests(blocks: list[int], clips: list[int], kinds: list[str] = KEPT) -> list[dict]:
    "Gradients of the released model with so many of its blocks."
    return [{'name': f'{kind}, {n} blocks, {rows} clips', 'layers': n, 'rows': rows, 'text': TEXT,
             'codes': CODES, 'training': {'precision': 'bfloat16'} | training,
             'parts': ['gradients']}
            for n in blocks for rows in clips for kind, training in KEPT.items() if kind in kinds]


def step_requests() -> list[dict]:
    "The step of a short model, at a length that is a multiple of 8 and at one that is not."
    about = {'layers': 4, 'conditioning': 2, 'rows': 8, 'text': 120, 'training': {'precision': 'bfloat16'}}
    return [{'name': f'{156 + codes} positions', 'codes': codes, 'parts': ['step'], **about}
            for codes in (220, 207)]


def rows_of(wanted: list[dict], card: str, *plan: str) -> list[dict]:
    "Write programs in one process, and compile each in one, which gives its memory back."
    def run(*command, **how):
        done = subprocess.run(command, text=True, capture_output=True, **how)
        if done.returncode: raise RuntimeError(done.stderr[-2000:])
        return done.stdout

    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, __file__, 'write', folder, input=json.dumps(wanted))
        compiled = [run(PYTHON, __file__, 'compile', card, path, *plan)
                    for path in sorted(Path(folder).glob('*.mlir'))]
    return [json.loads(said.splitlines()[-1]) for said in compiled]


def main():
    "The command line."
    raw = argparse.RawDescriptionHelpFormatter
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parse.add_argument('what', choices=['setup', 'record', 'memory', 'step', 'small'])
    parse.add_argument('cards', nargs='*', help=f'of {", ".join(CARDS)}; default: all')
    parse.add_argument('--blocks', type=int, nargs='+', default=[30], help='of the models of memory')
    parse.add_argument('--clips', type=int, nargs='+', default=[2, 4, 8, 12, 16], help='of its batches')
    parse.add_argument('--kept', nargs='+', choices=KEPT, default=[*KEPT], help='settings of memory')
    parse.add_argument('--anew', action='store_true', help='compile what the newest record holds again')
    parse.add_argument('--buffers', default='', help="folder for XLA's lists of buffers")
    parse.add_argument('--only', nargs='+', choices=[*STEPS, *OTHERS], help='programs of record and small')
    o = parse.parse_args()
    if unknown := {*o.cards} - CARDS.keys(): parse.error(f'there is no card {", ".join(unknown)}')
    setup()
    if o.what == 'setup': return
    wanted = (memory_requests(o.blocks, o.clips, o.kept) if o.what == 'memory' else
              step_requests() if o.what == 'step' else requests(o.what == 'small'))
    wanted = [one for one in wanted if not o.only or one['name'] in o.only]
    for card in o.cards or CARDS:
        if o.what != 'small': make_record(o.what, card, wanted, o.anew, o.buffers)
        else:
            for row in rows_of(wanted, card): print(json.dumps(row))


def key(row: dict) -> str:
    "What was asked for, of a request or of a row of its programs."
    asked = {name: row[name] for name in ASKED if name in row}
    return json.dumps([re.sub('^(gradients|update|step), ', '', row['name']), asked], sort_keys=True)


def make_record(what: str, card: str, wanted: list[dict], anew: bool = False, buffers: str = ''):
    "Compile the programs that the newest record of a card lacks, and write the record after each."
    sys.path.insert(0, str(ROOT))
    from xtts_nb.records import record
    page, name = {'record': 'xla', 'memory': 'xla_memory', 'step': 'xla_step'}[what], CARDS[card]['name']
    model = f'the released model, clips of {TEXT} text tokens and {CODES} codes'
    if what == 'step': model = 'four blocks of the released model and two of its conditioning'
    about = {'model': model,
             'compiler': f'jaxlib {JAX}, without the card, nothing autotuned'}
    capability = CARDS[card]['major'] + CARDS[card]['minor'] / 10
    command = f'python benchmarks/xla_gpu.py {what} {card}'   # which goes on until all is there
    rows = newest(page, name, about)
    order = {key(one): place for place, one in enumerate(wanted)}
    rows = [row for row in rows if not (anew and key(row) in order)]
    done, mine = {key(row) for row in rows}, None
    for one in wanted:
        if key(one) in done: continue
        asked = {name: one[name] for name in ASKED if name in one}
        new = [row | asked for row in rows_of([one], card, 'plan', buffers)]
        rows = sorted(rows + new, key=lambda row: order.get(key(row), len(order)))
        path = record(page, rows, RECORDS, command, name, capability=capability, **about)
        if mine: mine.unlink()   # its rows are in the new one; a record of another call stays
        mine = path
        print(path, *new, sep='\n', file=sys.stderr, flush=True)


def newest(page: str, device: str, about: dict) -> list[dict]:
    "Rows of a card's newest record for this model and compiler; each names the commit it was made at."
    found = [json.loads(path.read_text()) for path in RECORDS.glob(f'{page}-*.json')]
    found = [one for one in found if one['device'] == device and about.items() <= one.items()]
    if not found: return []
    one = max(found, key=lambda one: (one['date'], one['time'], len(one['rows'])))
    return [{'commit': one['commit']} | row for row in one['rows']]


if __name__ == '__main__':
    if sys.argv[1:2] == ['compile']:
        compile_program(sys.argv[2], Path(sys.argv[3]), 'plan' in sys.argv[4:5], *sys.argv[5:])
    elif sys.argv[1:2] == ['write']: write(sys.argv[2], json.load(sys.stdin))
    else: main()

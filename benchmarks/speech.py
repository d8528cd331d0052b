"""Codes per second, and the time to the first sound, of coqui-tts and of our variants, at the released sizes.

    python benchmarks/speech.py --coqui-python PYTHON
        --coqui-python PYTHON   of an environment with coqui-tts 0.28
        --rounds N, --budget MINUTES   as of `xtts-nb bench say`
        --json, --record   one JSON object as the last line of stdout; a record in benchmarks/

The decoder of coqui-tts has the released size only, so the model is that of `bench say --preset xtts_v2`,
with random weights. `coqui` is `inference`, which runs the GPT a second time over all codes to get the
states; `coqui_stream` is `inference_stream` with the chunks that it recommends, which decodes everything
spoken so far again for each chunk. The model gets our sizes, our tokens and a random voice, its STOP is
made impossible, it has as many threads, and it waits while another variant runs."""
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.peer import (  # noqa: E402
    COQUI, OtherPython, add_rounds, arguments, measuring, output, run, start, step_peer)
from xtts_nb.app.cli_bench import _SAY_CODES  # noqa: E402
from xtts_nb.app.bench_say import _say_speed  # noqa: E402
from xtts_nb.bench import _check_python  # noqa: E402
from xtts_nb.config import XTTSConfig  # noqa: E402


def _coqui_speech(threads, layers, width, heads, vocabulary, ids, codes, streamed):
    "Speaks without end: codes made, and seconds to the first sound."
    import time
    import torch
    from TTS.tts.configs.xtts_config import XttsConfig
    from TTS.tts.models.xtts import Xtts, XttsArgs, XttsAudioConfig
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    sizes = XttsArgs(gpt_layers=layers, gpt_n_model_channels=width, gpt_n_heads=heads,
                     decoder_input_dim=width, gpt_number_text_tokens=vocabulary,
                     gpt_start_text_token=2, gpt_stop_text_token=0,
                     gpt_num_audio_tokens=1026, gpt_start_audio_token=1024, gpt_stop_audio_token=1025)
    model = Xtts(XttsConfig(model_args=sizes, audio=XttsAudioConfig(22050, 24000)))
    model.tokenizer.encode = lambda text, lang: ids
    model.init_models()
    model.eval()
    model.gpt.init_gpt_for_inference(kv_cache=True)
    model.gpt.mel_head.bias.data[1025] = -1e4   # never STOP
    model.gpt.max_gen_mel_tokens = codes
    model.to(device)
    voice = torch.randn(1, 32, width, device=device), torch.randn(1, 512, 1, device=device)
    while True:
        begin, made = time.perf_counter(), 0
        if streamed:
            first = None
            for piece in model.inference_stream('text', 'en', *voice):
                first = first or time.perf_counter() - begin
                made += len(piece)
            made = round(made / 1024 * 22050 / 24000)
        else:
            made = model.inference('text', 'en', *voice, enable_text_splitting=False)['gpt_latents'].shape[1]
            first = time.perf_counter() - begin
        yield {'codes': made, 'first_s': first}

def coqui_speech(python: str | Path, config: XTTSConfig, ids: list[int], codes: int,
                 streamed: bool) -> OtherPython:
    "coqui-tts at these sizes; a call speaks the tokens once, and returns `codes` and `first_s`."
    gpt = config.model.gpt
    return step_peer(python, _coqui_speech, layers=gpt.num_layers, width=gpt.hidden_dim, heads=gpt.num_heads,
                     vocabulary=gpt.text_tokens, ids=ids, codes=codes, streamed=streamed)


def coqui_arms(
    python: str | Path,
    config: XTTSConfig,
    codes: int,            # of a text
    ids: list[int],        # its tokens
    stack: ExitStack,      # closes the processes
) -> dict[str, OtherPython]:
    "The two ways in which coqui-tts speaks."
    return {name: stack.enter_context(coqui_speech(python, config, ids, codes, streamed))
            for name, streamed in {'coqui': False, 'coqui_stream': True}.items()}


def main():
    "The command line."
    parser = add_rounds(arguments(__doc__), 5)
    parser.add_argument('--coqui-python', required=True, help='of an environment with coqui-tts 0.28')
    given = parser.parse_args()
    _check_python(given.coqui_python, COQUI)
    config = XTTSConfig.xtts_v2()
    start()
    with measuring(given) as tell:
        rows, more = _say_speed(config, _SAY_CODES, given.rounds,
                                partial(coqui_arms, given.coqui_python, config, _SAY_CODES),
                                partial(tell, 'measure'))
    gpt = config.model.gpt
    about = f'xtts_v2, GPT {gpt.num_layers} x {gpt.hidden_dim}, {_SAY_CODES} codes for each text'
    output(given, 'say_full', {'rows': rows, 'model': about, **more})


if __name__ == '__main__': run(main)

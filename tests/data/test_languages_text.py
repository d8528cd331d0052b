"The cleaners compared with the output of coqui 0.28, and texts for which coqui raises an error."
import json
import os
import sys
from pathlib import Path

import pytest

from xtts_nb.config import UserError
from xtts_nb.data.text import ABBREVIATIONS, LANGUAGES, SYMBOLS, Tokenizer, clean, clean_for, clean_persian

# text, and of coqui: the cleaned text and the ids, or the error that it raises
SENTENCES = json.loads((Path(__file__).parents[1] / 'stored/sentences.json').read_text(encoding='utf-8'))
ROWS = [(language, i) for language, rows in SENTENCES.items() for i in range(len(rows))]
SPOKEN = [(language, i) for language, i in ROWS if 'clean' in SENTENCES[language][i]]


@pytest.fixture(scope='module')
def vocabulary():
    "XTTS's own tokenizer, if the environment names its file."
    path = os.environ.get('XTTS_NB_VOCAB')
    if not path: pytest.skip('no vocabulary of XTTS: XTTS_NB_VOCAB names no file')
    return Tokenizer.load(path, 'xtts')


def test_each_language_has_thirty_sentences_that_both_can_say():
    assert list(SENTENCES) == LANGUAGES
    assert all(sum('clean' in row for row in rows) >= 30 for rows in SENTENCES.values())

@pytest.mark.parametrize('language, i', SPOKEN)
def test_the_cleaned_text_is_equal(language, i):
    row = SENTENCES[language][i]
    assert clean_for(row['text'], language, as_trained=True) == row['clean']

@pytest.mark.parametrize('language', [l for l in LANGUAGES if l not in ('hu', 'ko', 'hi')])
def test_the_ids_are_equal(vocabulary, language):
    rows = [row for row in SENTENCES[language] if 'clean' in row]
    assert [vocabulary.encode(row['text'], language) for row in rows] == [row['ids'] for row in rows]

@pytest.mark.parametrize('language, i', [row for row in ROWS if row not in SPOKEN])
def test_what_raises_there_is_spoken_here(language, i):
    said = clean_for(SENTENCES[language][i]['text'], language)
    assert said and not any(c in '0123456789' for c in said)

@pytest.mark.parametrize('language', LANGUAGES)
@pytest.mark.parametrize('text', ['', ' ', '\t\n', '"', '"" ""'])
def test_nothing_stays_nothing(text, language): assert clean_for(text, language).strip(' "') == ''

@pytest.mark.parametrize('language', [l for l in LANGUAGES if l != 'ja'])
@pytest.mark.parametrize('number', ['1' * 400, pytest.param('1' * 5000, marks=pytest.mark.slow),
                                    '1' * 400 + '.5', '9' * 40 + '.', '$' + '9' * 30, '$' + '1' * 400,
                                    '1.' + '3' * 40, '0' * 50, '.', ',', '$', '1,', '€.5',
                                    '£1.2.3', '1.000.00,5', '3.7.', '$0', '00.00'])
def test_no_number_is_too_much(number, language):
    said = clean_for(f'x {number} y', language)
    assert said.startswith('x') and not any(c in '0123456789' for c in (said if language != 'zh-cn' else ''))

def test_more_digits_than_python_reads():
    assert not any(c in '0123456789' for c in clean_for('1' * 5000, 'en'))

@pytest.mark.parametrize('language', ['sw', 'xx', 'la'])
def test_a_language_without_rules_is_lower_cased(language):
    assert clean_for(' "Habari" ya  DR. 5 & ', language) == 'habari ya dr. 5 &'

@pytest.mark.parametrize('language, text, cleaned', [
    ('tr', 'İZMİR', 'izmir'), ('ru', 'г-жа д-р', 'госпожа доктор'),
    ('en', 'Mr. Mrs Dr.', 'mister mrs doctor'), ('ko', '"5"', 'o'),
    ('zh-cn', '我们的……“吗”？', 'wo3men5de5,,,ma5,,'), ('hi', '"5 %"', 'पाँच प्रतिशत'),
    ('ja', '今日は', 'kyou wa')])
def test_each_rule_has_its_language(language, text, cleaned): assert clean_for(text, language) == cleaned

@pytest.mark.parametrize('a, b', [('en-gb', 'en'), ('pt-br', 'pt'), ('zh', 'zh-cn'), ('zh-tw', 'zh-cn')])
def test_the_region_does_not_matter(a, b): assert clean_for('3 & $5, 早', a) == clean_for('3 & $5, 早', b)

def test_tables_are_whole():
    assert all(set(row) == set('&@%#$£°') and all(row.values()) for row in SYMBOLS.values())
    assert set(ABBREVIATIONS) <= set(SYMBOLS)
    assert {l.split('-')[0] for l in LANGUAGES} - {'ja'} <= set(SYMBOLS)

@pytest.mark.parametrize('language, text, package', [
    ('en', 'room 5', 'num2words'), ('zh-cn', '早', 'pypinyin'), ('ja', '今日', 'cutlet'),
    ('ko', '오늘', 'ko_speech_tools')])
def test_a_missing_library_names_the_extra(monkeypatch, language, text, package):
    from xtts_nb.data.text import japanese_reader
    japanese_reader.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf'{package}.*xtts_nb\[languages\]'): clean_for(text, language)
    japanese_reader.cache_clear()

@pytest.mark.parametrize('language', ['en', 'hi', 'ru'])
def test_words_alone_need_no_library(monkeypatch, language):
    monkeypatch.setitem(sys.modules, 'num2words', None)
    assert clean_for('Good & bad', language).startswith('good')


@pytest.mark.parametrize('language, text, cleaned', [
    ('pl', '-5', 'minus pięć'), ('en', '(−5) 3-5', '(minus five) three five'),
    ('zh-cn', '降到-7', 'jiang4dao4fu4qi1'),
    ('hi', '1,00,000', 'एक लाख'), ('hi', '१२३', 'एक सौ तेईस'), ('ar', '٣٫٥', 'ثلاثة فاصلة خمسة'),
    ('tr', 'ISI 3.5', 'ısı üç virgül beş'), ('tr', 'İzmir', 'izmir'),
    ('fr', '1 000 000 €', 'un million euros'),
    ('fr', '12\u202f345', 'douze mille trois cent quarante-cinq'),
    ('ru', '3-ье', 'третий'),
    ('ko', '1,234', 'cheon-ibaegsamsibsa'),
    ('pt', '€21', 'vinte e um euros'),
    ('de', 'Im Jahr 2001.', 'im jahr zweitausendeins.'),
    ('en', '½ cup, 10:05, 2.0.1', 'zero point five cup, ten zero five, two zero one'),
    ('en', '5kg of H₂O at 3pm', 'five kg of h two o at three pm'), ('en', 'ten m²', 'ten m squared'),
    ('en', '021 & +1 (555) 123', 'zero two one and one five five five one two three'),
    ('ja', '12月', 'juu ni gatsu'), ('de', 'e\u0301 5\u00ad0', 'é fünfzig'),
    ('en', 'R&amp;B &#x27;', "r and b '"),
    ('de', '$1,000.50 1.234', 'eintausend dollar und fünfzig cent eintausendzweihundertvierunddreißig'),
    ('en', '10 000 or 192.168.100.200.', 'ten thousand or one hundred and ninety-two, one hundred and '
     'sixty-eight, one hundred, two hundred.'),
    ('en', '$5 million, US$3, £2m', 'five million dollars, us three dollars, two million pounds sterling'),
    ('ar', '$5', 'خمسة دولار'), ('hu', '£3', 'három font'), ('pt', 'R$ 2, H2O', 'dois reais, h dois o'),
    ('en', '1\ufe0f\u20e3②CO₂ 10⁻³', 'one two co two ten minus three'), ('tr', '5%', 'yüzde beş'),
    ('fr', '1ère', 'premier'), ('zh-cn', '12:34:56', 'shi2er4dian3san1shi2si4fen1wu3shi2liu4miao3'),
    ('ja', 'パピ ポ', 'papi po'), ('en', 'a\x07b', 'a b'),
    ('zh-hk', '早', '早')])
def test_what_people_write_is_said_as_they_mean_it(language, text, cleaned):
    assert clean_for(text, language) == cleaned

@pytest.mark.parametrize('language, text, cleaned', [
    ('sv', '12 katter, -3,5', 'tolv katter, minus tre komma fem'), ('uk', '2', 'два'), ('kab', '3 x', '3 x'),
    ('en', '"Dr." 5 & 3%', 'dr. five and three percent'), ('fa', '۵٪', 'پنج درصد'), ('zh', '3个', '三个'),
    ('tr', 'ISPARTA', 'ısparta'), ('vi', '$5', 'năm $'), ('ar', 'مـــرحبا', 'مرحبا')])
def test_the_plain_cleaner_says_numbers_in_words(language, text, cleaned):
    assert clean(text, language) == clean(cleaned, language) == cleaned


# ---- Persian

Z = '\u200c'   # the half-space

@pytest.mark.parametrize('text, cleaned', [
    ('', ''), ('كتابي', 'کتابی'), ('ىك', 'یک'), ('ة', 'ه'), ('خانۀ ما', f'خانه{Z}ی ما'), ('کـــتاب', 'کتاب'),
    ('کِتابُ', 'کتاب'), ('کتاب\u064b\u0652', 'کتاب'),
    ('ا\u0653', 'آ'), ('خانه\u0654 ما', f'خانه{Z}ی ما'), ('۰۲۱', 'صفر دو یک'),
    ('می رود', f'می{Z}رود'), ('نمی رود', f'نمی{Z}رود'), (f'می{Z}رود', f'می{Z}رود'),
    (f'می{Z}{Z}رود', f'می{Z}رود'),
    ('قدیمی رود', 'قدیمی رود'), ('کتاب ها', f'کتاب{Z}ها'), ('کتاب های او', f'کتاب{Z}های او'),
    ('بزرگ ترین', f'بزرگ{Z}ترین'),
    (f'کتاب{Z} ', 'کتاب'), (f'{Z}کتاب{Z}.', 'کتاب.'), (f'الف {Z}ب', 'الف ب'), ('\u200eسلام\u200f', 'سلام'),
    ('۰', 'صفر'), ('۵', 'پنج'), ('٥', 'پنج'), ('5', 'پنج'), ('۱۰', 'ده'), ('۱۹', 'نوزده'), ('۲۰', 'بیست'),
    ('۲۱', 'بیست و یک'),
    ('۱۰۰', 'صد'), ('۲۰۰', 'دویست'), ('۱۰۱', 'صد و یک'), ('۱۰۰۰', 'هزار'), ('۲۰۰۰', 'دو هزار'),
    ('۱۴۰۲', 'هزار و چهارصد و دو'),
    ('۱۰۰۰۰۰۰', 'یک میلیون'), ('1,000', 'هزار'),
    ('۱٬۲۳۴٬۵۶۷', 'یک میلیون و دویست و سی و چهار هزار و پانصد و شصت و هفت'),
    ('۳٫۱۴', 'سه ممیز چهارده'), ('3.05', 'سه ممیز صفر پنج'), ('2.0', 'دو ممیز صفر'),
    ('۱۴۰۲.', 'هزار و چهارصد و دو.'),
    ('۱۵٪', 'پانزده درصد'), ('٪۱۵', 'پانزده درصد'), ('%15', 'پانزده درصد'), ('15 %', 'پانزده درصد'),
    ('-۵', 'منفی پنج'),
    ('1' * 16, ' '.join(['یک'] * 16)), ('1' * 5000, ' '.join(['یک'] * 5000)),
    ('۵-۳', 'پنج-سه'), ('10:30', 'ده و سی دقیقه'), ('10:00', 'ده'), ('$5', 'پنج دلار'),
    ('5 €', 'پنج یورو'), ('الف & ب', 'الف و ب')])
def test_persian(text, cleaned):
    assert clean_for(text, 'fa') == cleaned and clean_persian(cleaned) == cleaned

"Digits in words: what groups, money without cents, and the tables' ends."
import pytest

from xtts_nb.files import fingerprint
from xtts_nb.data.text import (
    PERSIAN_UNITS, RULES, UNSUPPORTED, chinese_number, decimal_words, hindi_words, money_words, ordinal_words,
    persian_words, spell_chinese, spell_numbers, spell_persian)


@pytest.mark.parametrize('language, text, said', [
    ('en', '1,234', 'one thousand, two hundred and thirty-four'),
    ('de', '1.234', 'eintausendzweihundertvierunddreißig'),
    ('en', '1.234', 'one point two three four'), ('de', '1,234', 'eins Komma zwei drei vier'),
    ('en', '1,23', 'one point two three'),
    ('en', '2.0', 'two'), ('it', '2.0', 'due virgola zero'), ('tr', '1,5', 'bir,beş'), ('en', '', ''),
    ('en', '...', '...'),
    ('en', '$1', 'one dollar'), ('en', '$1,000', 'one thousand dollars'), ('en', '$ 5', '$ five'),
    ('ru', '£5', '£пять'),
    ('en', '$1.2.3', '$one point two.three'), ('de', '3. mai', 'dritte mai'), ('de', '3.mai', 'drei.mai'),
    ('cs', '3. x 5.', 'tři x pět.'), ('ru', '$5 £5', '$пять £пять'), ('ko', '€5 $5', '€오 오달러 영센트'),
    ('fr', '1234.567', 'mille deux cent trente-quatre virgule cinq six sept'),
    ('fr', '168483.000', 'cent soixante-huit millions quatre cent quatre-vingt-trois mille'),
    ('en', 'the 3rd of 1,234 coins costs $12.50.',
     'the third of one thousand, two hundred and thirty-four coins costs twelve dollars, fifty cents.'),
    ('en', '$1,234', 'one thousand, two hundred and thirty-four dollars'), ('en', '5€', 'five euro'),
    ('pt', '€21', 'vinte'),   # as in training: cut at what stands before its cents
    ('de', 'die 3. von 1.234 münzen kostet 12,50€.',
     'die dritte von eintausendzweihundertvierunddreißig münzen kostet zwölf Euro und fünfzig Cent.'),
    ('hi', '2.0', 'दो'), ('hi', '$.5', 'शून्य दशमलव पाँच डॉलर'), ('hi', '12.5', 'बारह दशमलव पाँच'),
    ('hi', '$5', 'पाँच डॉलर'), ('hi', '$2.50', 'दो दशमलव पाँच शून्य डॉलर')])
def test_spelled(language, text, said): assert spell_numbers(text, language) == said

@pytest.mark.parametrize('language', RULES)
def test_every_whole_number_is_spelled(language):
    said = [spell_numbers(str(n), language)
            for n in (*range(120), 200, 999, 1000, 1001, 99_999, 10**6, 10**7)]
    assert len(set(said)) == len(said) and not any(c in '0123456789' for c in ''.join(said))

@pytest.mark.parametrize('words, said', [
    (lambda: money_words('12.50', '$', 'en'), 'twelve dollars, fifty cents'),
    (lambda: money_words('20', '€', 'de'), 'zwanzig Euro'),
    (lambda: decimal_words('3,14', 'de'), 'drei Komma eins vier'),
    (lambda: ordinal_words('23', 'rd', 'en'), 'twenty-third'), (lambda: ordinal_words('3', '.', 'cs'), 'tři'),
    (lambda: ordinal_words('3', '.', 'cs', last=True), 'tři.'),
    (lambda: ordinal_words('3', 'x', 'cs'), 'třix'),
    (lambda: decimal_words('7.05', 'hi'), 'सात दशमलव शून्य पाँच')])
def test_a_number_of_each_kind(words, said): assert words() == said

@pytest.mark.parametrize('amount',
                         [('5', '£', 'ru'), ('5', '$', 'tr'), ('1.2.3', '$', 'en'), ('5', '€', 'ko')])
def test_money_that_a_language_lacks(amount):
    with pytest.raises(UNSUPPORTED): money_words(*amount)

@pytest.mark.parametrize('n, said', [
    (0, 'शून्य'), (100, 'एक सौ'), (101, 'एक सौ एक'), (1999, 'एक हज़ार नौ सौ निन्यानवे'), (10**5, 'एक लाख'),
    (10**7, 'एक करोड़'),
    (10**9, 'एक सौ करोड़'), (99, 'निन्यानवे'), (999, 'नौ सौ निन्यानवे'), (1000, 'एक हज़ार'),
    (99_999, 'निन्यानवे हज़ार नौ सौ निन्यानवे'),
    (9_999_999, 'निन्यानवे लाख निन्यानवे हज़ार नौ सौ निन्यानवे')])
def test_hindi(n, said): assert hindi_words(n) == said

@pytest.mark.parametrize('digits, said', [
    ('0', '零'), ('2', '二'), ('10', '十'), ('12', '十二'), ('20', '二十'), ('22', '二十二'), ('00', ''),
    ('007', '零七'), ('010', '零一十'), ('110', '一百一十'), ('200', '两百'), ('202', '两百零二'),
    ('2002', '两千零二'), ('2222', '两千两百二十二'), ('20000', '两万'), ('20202', '两万零二百零二'),
    ('100100', '十万零一百'),
    ('120000', '十二万'), ('200000000', '两亿'), ('100000002', '一亿零二'), ('2000000000000', '两万亿'),
    ('1' * 17, '一' * 17), ('1' * 17 + '.5', '一' * 17 + '点五'), ('1.50', '一点五零'), ('0.5', '零点五')])
def test_chinese_counts(digits, said): assert chinese_number(digits) == said

@pytest.mark.parametrize('text, said', [
    ('1999年', '一九九九年'), ('1862年', '一千八百六十二年'),
    ('08年', '零八年'), ('12年', '十二年'), ('1234个', '一千两百三十四个'),
    ('1234', '一二三四'), ('123', '一百二十三'), ('13812345678', '一三八一二三四五六七八'),
    ('+8613812345678', '八六一三八一二三四五六七八'),
    ('3/4', '四分之三'),
    ('010-12345678', '零一零一二三四五六七八'), ('12345678元', '一千两百三十四万五千六百七十八元'),
    ('15%', '百分之十五'),
    ('5月3日', '五月三日'), ('3.14159', '三.一四一五九'), ('没有', '没有'), ('b2b和a4', 'b2b和a四')])
def test_chinese_in_context(text, said): assert spell_chinese(text) == said

def test_persian_units_are_whole():
    assert [persian_words(u) for u, _ in PERSIAN_UNITS] == ['یک تریلیون', 'یک میلیارد', 'یک میلیون', 'هزار']
    said = [persian_words(n) for n in (*range(1200), 10**6 + 1, 10**18)]
    assert len(set(said)) == len(said) and not any('  ' in s or s != s.strip() for s in said)

@pytest.mark.parametrize('text, said', [
    ('12.50 متر، 15% و 10:30', 'دوازده ممیز پنجاه متر، پانزده درصد و ده و سی دقیقه'),
    ('3.05', 'سه ممیز صفر پنج'), ('2.0', 'دو ممیز صفر'),
    ('5.', 'پنج.'), ('0.00', 'صفر ممیز صفر صفر'), ('%15', 'پانزده درصد'), ('-5', 'منفی پنج'),
    ('5-3', 'پنج-سه'), ('10:00', 'ده'), ('1:05', 'یک و پنج دقیقه'),
    ('$5', 'پنج دلار'), ('$12.', 'دوازده دلار .'), ('£2', 'دو پوند'), ('5 €', 'پنج یورو'),
    ('1,000', 'هزار'), ('1,00', 'یک,صفر'),
    ('100', 'صد'), ('1' * 16, ' '.join(['یک'] * 16)),
    ('1' + '0' * 14, 'صد تریلیون')])
def test_persian_in_context(text, said): assert ' '.join(spell_persian(text).split()) == said

EDGES = sorted({10**k + d for k in range(2, 16) for d in (-1, 0, 1, 10**k)})
FIVE_DIGITS = [f'{n:05d}' for n in range(1200)]
TESTED = {   # function, numbers, fingerprint of the words
    'hindi': (hindi_words, [*range(1200), *EDGES], '0d56e5d0a3d078e5'),
    'persian': (persian_words, [*range(1200), *EDGES], '3058ad3597b67b79'),
    'chinese': (chinese_number, [*map(str, [*range(3000), *range(9990, 31000, 7), *EDGES]), *FIVE_DIGITS],
                '99a2d6edf3c08d9c')}

@pytest.mark.parametrize('language', TESTED)
def test_the_words_of_many_numbers_are_those_that_were_looked_at(language):
    words, numbers, key = TESTED[language]
    assert fingerprint([words(n) for n in numbers]) == key

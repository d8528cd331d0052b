"Digits in words: what groups, money without cents, and the tables' ends."
import pytest

from xtts_nb.numbers import (PERSIAN_UNITS, RULES, UNKNOWN, chinese_number, hindi_words, money_words, persian_words,
                             spell_chinese, spell_numbers)


@pytest.mark.parametrize('language, text, said', [
    ('en', '1,234', 'one thousand, two hundred and thirty-four'), ('de', '1.234', 'eintausendzweihundertvierunddreißig'),
    ('en', '1.234', 'one point two three four'), ('de', '1,234', 'eins Komma zwei drei vier'),
    ('en', '1,23', 'one point two three'),
    ('en', '2.0', 'two'), ('it', '2.0', 'due virgola zero'), ('tr', '1,5', 'bir,beş'), ('en', '', ''), ('en', '...', '...'),
    ('en', '$1', 'one dollar'), ('en', '$1,000', 'one thousand dollars'), ('en', '$ 5', '$ five'), ('ru', '£5', '£пять'),
    ('en', '$1.2.3', '$one point two.three'), ('de', '3. mai', 'dritte mai'), ('de', '3.mai', 'drei.mai'),
    ('cs', '3. x 5.', 'tři x pět.'), ('ru', '$5 £5', '$пять £пять'), ('ko', '€5 $5', '€오 오달러 영센트'),
    ('fr', '1234.567', 'mille deux cent trente-quatre virgule cinq six sept'),
    ('fr', '168483.000', 'cent soixante-huit millions quatre cent quatre-vingt-trois mille'),
    ('hi', '12.5', 'बारह दशमलव पाँच'), ('hi', '$5', 'पाँच डॉलर'), ('hi', '$2.50', 'दो दशमलव पाँच शून्य डॉलर')])
def test_spelled(language, text, said): assert spell_numbers(text, language) == said

@pytest.mark.parametrize('language', RULES)
def test_every_whole_number_is_said(language):
    said = [spell_numbers(str(n), language) for n in (*range(120), 200, 999, 1000, 1001, 99_999, 10**6, 10**7)]
    assert len(set(said)) == len(said) and not any(c in '0123456789' for c in ''.join(said))

@pytest.mark.parametrize('amount', [('5', '£', 'ru'), ('5', '$', 'tr'), ('1.2.3', '$', 'en'), ('5', '€', 'ko')])
def test_money_that_a_language_lacks(amount):
    with pytest.raises(UNKNOWN): money_words(*amount)

@pytest.mark.parametrize('n, said', [
    (0, 'शून्य'), (100, 'एक सौ'), (101, 'एक सौ एक'), (1999, 'एक हज़ार नौ सौ निन्यानवे'), (10**5, 'एक लाख'), (10**7, 'एक करोड़'),
    (10**9, 'एक सौ करोड़')])
def test_hindi(n, said): assert hindi_words(n) == said

@pytest.mark.parametrize('digits, said', [
    ('0', '零'), ('2', '二'), ('10', '十'), ('12', '十二'), ('20', '二十'), ('110', '一百一十'), ('200', '两百'),
    ('202', '两百零二'), ('00', ''), ('007', '零七'), ('010', '零一十'), ('2222', '两千两百二十二'), ('20000', '两万'),
    ('20202', '两万零二百零二'), ('100100', '十万零一百'),
    ('120000', '十二万'), ('200000000', '两亿'), ('100000002', '一亿零二'), ('1.50', '一点五零'), ('0.5', '零点五')])
def test_chinese_counts(digits, said): assert chinese_number(digits) == said

@pytest.mark.parametrize('text, said', [
    ('1999年', '一九九九年'), ('1862年', '一千八百六十二年'),
    ('08年', '零八年'), ('12年', '十二年'), ('1234个', '一千两百三十四个'),
    ('1234', '一二三四'), ('123', '一百二十三'), ('13812345678', '一三八一二三四五六七八'),
    ('+8613812345678', '八六一三八一二三四五六七八'),
    ('3/4', '四分之三'),
    ('010-12345678', '零一零一二三四五六七八'), ('12345678元', '一千两百三十四万五千六百七十八元'), ('15%', '百分之十五'),
    ('5月3日', '五月三日'), ('3.14159', '三.一四一五九'), ('没有', '没有'), ('b2b和a4', 'b2b和a四')])
def test_chinese_in_context(text, said): assert spell_chinese(text) == said

def test_persian_units_are_whole():
    assert [persian_words(u) for u, _ in PERSIAN_UNITS] == ['یک تریلیون', 'یک میلیارد', 'یک میلیون', 'هزار']
    said = [persian_words(n) for n in (*range(1200), 10**6 + 1, 10**18)]
    assert len(set(said)) == len(said) and not any('  ' in s or s != s.strip() for s in said)

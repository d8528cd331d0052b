"Sentences: where one ends, in each language."
import pytest

from xtts_nb.data.sentences import sentences

@pytest.mark.parametrize('language, marked', [
    ('en', 'He met Dr. Smith there today. |Prof. X paid him $3.50 for it. |"Stop it now!" he said to me… '
           'and left. |Was it over then? |Yes, it was at 5.30 or so.'),
    ('en', 'It was in the year 12. |Nobody came there.\n\n|A title of a chapter\n \n|The text that goes on\n'
           'here, i.e. so.'),
    ('es', '¿Qué tal está usted hoy? |¡Muy bien, gracias a Dios!'),
    ('zh-cn', '你好，我是学生。|今天天气很好！|你去哪里呢？|「好。」|他就这样说。|'
              '他说ok，好的。|ok，就这样说'),
    ('ar', 'كيف حالك اليوم؟ |أنا بخير والحمد لله.'), ('en', '\n\n  The only one of them\n\n')])
def test_sentences(language, marked):
    assert '|'.join(sentences(marked.replace('|', ''), language)) == marked

ABBREVIATED = {   # | is where a sentence ends
    'en': 'Prof. Xu and Mrs. Day live in No. 5, see Fig. II, e.g. Berlin, St. Louis, Smith Jr., Bob, '
          'U.S. Army. |He said no. |Then it was I. |Cats, dogs etc. |They met at 5 p.m. |All of them '
          '(J. R. R. Tolkien, i. e. He).',
    'es': 'La Sra. Díaz vive en EE. UU. Norte, p. ej. Miami, núm. 5, Avda. Sol, pág. XI, el Dr. Ruiz y '
          'Ud. Mismo. |Dijo que no. |Eso es lo que pidió el chef. |Ven aquí.',
    'fr': 'M. Dupont, Mme. Roy, le Dr. Bon et Mgr. Lys, p. ex. Paris, av. Foch, env. 30, no. 5, av. '
          'J.-C. Rome, cf. Kant. |Il dit non. |Elle a vu son ex. |Oui.',
    'de': 'Dr. Weiß, Hr. Maier, z. B. Äpfel, z.B. Birnen, u. a. Kohl, d. h. Gemüse, Nr. 5, Art. 3, S. '
          'Müller, Bd. IV, Hauptstr. 7, ca. Hundert, 3 Mio. Euro, am 3. Mai, Ludwig XIV. König. |So '
          'eine Art. |Er mag. |Das ist Max. |Er kam usw. |Es war 1990. |Ja.',
    'it': 'Il Sig. Rossi, la Dott. Neri, il Prof. Poli, ad es. Roma, p. es. Pisa, pag. 5, art. II, On. '
          'Moro, V.le Po, d.C. Augusto, S. Maria. |Lo fa con arte. |Ha detto di no. |Poi è. |Basta ecc. '
          '|Ora.',
    'pt': 'O Sr. Lima, a Dra. Reis, o Eng. Melo, p. ex. Lisboa, Av. Central, pág. 5, n. 7, a.C. Roma, '
          'V. Ex.ª disse. |Disse que não. |Assim é. |Faz mal. |Um, dois etc. |Sim.',
    'pl': 'Prof. Nowak, inż. Lis, ul. Długa, im. Jana, np. Kraków, m.in. Gdynia, m. in. Łódź, św. Anna, '
          'tzw. Baza, nr 5, str. 7, godz. XII, p. Ewa. |Było to w 1990 r. |Potem to i. |Kot, pies itd. '
          '|Dobra jest ta str. |Tak.',
    'tr': 'Prof. Kaya, Doç. Ak, Av. Can, Sn. Ece, örn. Ankara, bkz. Ek, No. 5, s. 7, Arş. Gör. Su, II. '
          'Murat, 3. Kat, T.C. Anayasası. |İşte bu o. |Onu bul. |Git gör. |Elma, armut vb. |Evet.',
    'ru': 'Театр им. Пушкина, ул. Ленина, г. Москва, т. е. Он, т.е. Она, проф. Иванов, акад. Павлов, '
          'св. Анна, рис. 5, стр. 7, гл. IV, А. С. Пушкин, см. Выше. |Это я. |Он ушёл в 1990 г. |Дом и '
          'т. д. |Нет.',
    'nl': 'Dhr. Bos, mevr. De Wit, prof. Smit, drs. Kok, bijv. Breda, o.a. Delft, d.w.z. Utrecht, nr. '
          '5, blz. 7, St. Jan, Kerkstr. 3, t.a.v. Jansen. |Zo een art. |Hij zei nee. |Kat, hond enz. '
          '|Ja.',
    'cs': 'Např. Praha, tzv. Mánes, MUDr. Nová, Ing. Malý, p. Dvořák, sv. Anna, č. 5, str. 7, r. 1990, '
          'ul. Dlouhá, t. j. Brno, 3. Května, Karel IV. Lucemburský, mj. Plzeň. |Řekl ne. |Takový str. '
          '|Kočka atd. |Ano.',
    'ar': 'قال د. أحمد و م. علي و أ. د. سامي في ص. 5 و ج. 2 سنة 50 ق. م. تقريبا. |كتب حرف ص. |ثم خرج. '
          '|نعم.',
    'zh-cn': '我住在No. 5号，Dr. 王和Mr. Li见Fig. 3。|他说no. |好。|对。',
    'ja': 'これはNo. 5です、Dr. 田中とMr. Sato、Vol. 3。|彼はno. |はい。',
    'hu': 'Dr. Nagy, ifj. Kovács, özv. Tóthné, Szt. István, kb. Tíz, ún. Kör, i. sz. Róma, Kr. e. 5, '
          '12. sz. 3, old. 7, II. János, 3. Emelet. |Itt van ő. |Ez a sz. |Kutya stb. |Igen.',
    'ko': '저는 Dr. 김과 Mr. 박을 No. 5에서 만났다. |그는 no. |네.',
    'hi': 'डॉ. शर्मा और पं. नेहरू, प्रो. राव, कु. मीरा, नं. 5, पृ. 7, रु. 500, ई. पू. भारत। |वह गया. '
          '|हाँ।',
    'fa': 'د. احمدی در ص. ۵ و ج. ۲ و ش. ۷ نوشت، ۵۰ ق. م. بود، ر. ک. کتاب. |این حرف ص. |بعد رفت. |بله.'}

@pytest.mark.parametrize('language', ABBREVIATED)
def test_an_abbreviation_ends_no_sentence(language):
    "And what looks like one does: a word, the last word before a number, the year before a unit."
    marked = ABBREVIATED[language]
    assert '|'.join(sentences(marked.replace('|', ''), language)) == marked

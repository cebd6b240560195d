// Sentences as token ids of a BERT, as the package reads them (language/tokenizer.py and tokenizer.json).

const POLITE_WORDS = /^(?:(?:please|kindly)\b[,:]?\s+)*/i;
const CHINESE = new RegExp(
  "[\\u4e00-\\u9fff\\u3400-\\u4dbf\\uf900-\\ufaff\\u{20000}-\\u{2a6df}\\u{2a700}-\\u{2b73f}" +
    "\\u{2b740}-\\u{2b81f}\\u{2b920}-\\u{2ceaf}\\u{2f800}-\\u{2fa1f}]",
  "gu",
);
const PUNCTUATION = /[\p{P}!-\/:-@[-`{-~]/u;

// Without polite words at the start and full stops at the end, unless nothing would be left.
export function readPart(sentence) {
  const start = sentence.match(POLITE_WORDS)[0].length;
  return sentence.slice(start).replace(/[. ]+$/, "") || sentence;
}

export class WordPiece {
  // `tokenizer`: the content of tokenizer.json. `maxTokens`: longer sentences lose their end.
  constructor(tokenizer, maxTokens) {
    this.vocabulary = new Map(Object.entries(tokenizer.model.vocab));
    this.prefix = tokenizer.model.continuing_subword_prefix;
    this.maxLetters = tokenizer.model.max_input_chars_per_word;
    this.unknown = this.vocabulary.get(tokenizer.model.unk_token);
    this.lowercase = tokenizer.normalizer.lowercase;
    // null stands for: as `lowercase`.
    this.stripsAccents = tokenizer.normalizer.strip_accents ?? this.lowercase;
    this.maxTokens = maxTokens;
  }

  encode(sentence) {
    const ids = [];
    for (const word of this.split(this.normalize(readPart(sentence)))) {
      ids.push(...this.pieces(word));
    }
    const words = ids.slice(0, this.maxTokens - 2);
    return [this.vocabulary.get("[CLS]"), ...words, this.vocabulary.get("[SEP]")];
  }

  normalize(text) {
    text = text.replace(/[^\S\t\n\r]|[\t\n\r]/gu, " ");
    text = text.replace(/[\p{C}\ufffd]/gu, "");
    text = text.replace(CHINESE, " $& ");
    if (this.stripsAccents) {
      text = text.normalize("NFD").replace(/\p{Mn}/gu, "");
    }
    if (this.lowercase) {
      // Letter by letter: of a whole word, JavaScript writes the last sigma in another way.
      text = [...text].map((letter) => letter.toLowerCase()).join("");
    }
    return text;
  }

  // Words, and each punctuation mark for itself.
  split(text) {
    const words = [];
    let word = "";
    for (const letter of text + " ") {
      const isPunctuation = PUNCTUATION.test(letter);
      if (!isPunctuation && /\S/u.test(letter)) {
        word += letter;
        continue;
      }
      if (word) {
        words.push(word);
      }
      if (isPunctuation) {
        words.push(letter);
      }
      word = "";
    }
    return words;
  }

  // The longest pieces of a word that the vocabulary has, from its start.
  pieces(word) {
    const letters = [...word];
    if (letters.length > this.maxLetters) {
      return [this.unknown];
    }
    const ids = [];
    let start = 0;
    while (start < letters.length) {
      let end = letters.length;
      let id;
      while (end > start && id === undefined) {
        const piece = letters.slice(start, end).join("");
        id = this.vocabulary.get(start ? this.prefix + piece : piece);
        if (id === undefined) {
          end -= 1;
        }
      }
      if (id === undefined) {
        return [this.unknown];
      }
      ids.push(id);
      start = end;
    }
    return ids;
  }
}

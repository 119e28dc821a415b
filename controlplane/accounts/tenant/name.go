package tenant

import (
	"unicode"
	"unicode/utf8"
)

// invisible are the characters that a name must not contain: control and format characters (among them those that
// change the direction of text and those of zero width), surrogates, private use, line and paragraph separators, and
// Unicode's default ignorable characters. A name with them can look like another, or change the direction of the
// surrounding text.
var invisible = []*unicode.RangeTable{unicode.C, unicode.Zl, unicode.Zp, unicode.Other_Default_Ignorable_Code_Point}

// joined are the scripts that write words with the zero-width joiner and non-joiner, U+200D and U+200C (RFC 5892,
// appendix A): cursive ones, and those with a virama.
var joined = []*unicode.RangeTable{
	unicode.Arabic, unicode.Syriac, unicode.Mongolian, unicode.Nko,
	unicode.Devanagari, unicode.Bengali, unicode.Gurmukhi, unicode.Gujarati, unicode.Oriya, unicode.Tamil, unicode.Telugu,
	unicode.Kannada, unicode.Malayalam, unicode.Sinhala, unicode.Khmer, unicode.Myanmar, unicode.Tibetan,
}

// printable reports whether text is UTF-8 without invisible characters. The zero-width joiner or non-joiner is allowed
// between two characters of the scripts in joined.
func printable(text string) bool {
	if !utf8.ValidString(text) {
		return false
	}
	for i, r := range text {
		if !unicode.In(r, invisible...) {
			continue
		}
		if r != '\u200c' && r != '\u200d' {
			return false
		}
		before, _ := utf8.DecodeLastRuneInString(text[:i])
		after, _ := utf8.DecodeRuneInString(text[i+utf8.RuneLen(r):])
		// Some vowel marks of these scripts belong to the script Inherited in Unicode.
		if !unicode.In(before, joined...) && !unicode.Is(unicode.Inherited, before) || !unicode.In(after, joined...) {
			return false
		}
	}
	return true
}

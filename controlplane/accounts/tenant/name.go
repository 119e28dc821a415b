package tenant

import (
	"unicode"
	"unicode/utf8"
)

// invisible holds the characters that a name must not contain: control and format characters, surrogates, private use,
// line and paragraph separators, and Unicode's default ignorable characters. They include the characters of zero width
// and those that change the direction of text. A name with such characters can look like another name, or change the
// direction of the surrounding text.
var invisible = []*unicode.RangeTable{unicode.C, unicode.Zl, unicode.Zp, unicode.Other_Default_Ignorable_Code_Point}

// joined holds the scripts in which words contain the zero-width joiner and non-joiner, U+200D and U+200C (RFC 5892,
// appendix A). They are the cursive scripts, and those with a virama.
var joined = []*unicode.RangeTable{
	unicode.Arabic, unicode.Syriac, unicode.Mongolian, unicode.Nko,
	unicode.Devanagari, unicode.Bengali, unicode.Gurmukhi, unicode.Gujarati, unicode.Oriya, unicode.Tamil, unicode.Telugu,
	unicode.Kannada, unicode.Malayalam, unicode.Sinhala, unicode.Khmer, unicode.Myanmar, unicode.Tibetan,
}

// printable reports whether text is valid UTF-8 without invisible characters. A zero-width joiner or non-joiner is
// allowed only between two characters of the scripts in the list joined.
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
		// Unicode assigns some vowel marks of these scripts to the script Inherited, so that script is allowed before
		// the joiner too.
		if !unicode.In(before, joined...) && !unicode.Is(unicode.Inherited, before) || !unicode.In(after, joined...) {
			return false
		}
	}
	return true
}

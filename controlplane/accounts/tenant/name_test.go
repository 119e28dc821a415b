package tenant

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestDisplayNames checks that a display name may be in any script, and that names with invisible characters, or with
// ones that change the direction of text, are refused: such a name can look like another, or change how the text around
// it is read.
func TestDisplayNames(t *testing.T) {
	for _, name := range []string{
		"", "Ada Lovelace", "O'Brien-Smith, 3rd (ops)", "Łukasz Żółć", "李明", "さくら", "한국어", "Ελένη", "Дарья", "שרה לוי", "فاطمة الزهراء",
		"\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", // Persian, with a zero-width non-joiner
		"\u0915\u094d\u200d\u0937",                         // Devanagari, with a virama and a zero-width joiner
		"café", "cafe\u0301", "a\u00a0b", "🙂", strings.Repeat("x", maxName),
	} {
		require.NoError(t, CheckName("name", name), "%+q", name)
	}
	for why, name := range map[string]string{
		"right-to-left override": "ada\u202enimda", "isolate": "ada\u2066x\u2069", "right-to-left mark": "ada\u200f", "Arabic letter mark": "\u061cada",
		"zero-width space": "ad\u200bmin", "zero-width joiner in Latin": "ad\u200dmin", "non-joiner at the end": "\u0645\u200c",
		"two joiners": "\u0645\u200c\u200c\u0645", "joiner alone": "\u200d", "word joiner": "ad\u2060min", "byte order mark": "\ufeffadmin",
		"soft hyphen": "ad\u00admin", "tag": "admin\U000e0041", "Hangul filler": "admin\u3164", "grapheme joiner": "ad\u034fmin",
		"line separator": "a\u2028b", "paragraph separator": "a\u2029b", "newline": "a\nb", "escape": "a\x1b[2J", "C1 control": "a\u009bb",
		"delete": "a\x7f", "private use": "a\ue000", "not UTF-8": "a\xff", "surrogate": "a\xed\xa0\x80", "too long": strings.Repeat("x", maxName+1),
	} {
		err := CheckName("name", name)
		require.True(t, fault.Is(err, fault.InvalidArgument), "%s: %v", why, err)
	}
}

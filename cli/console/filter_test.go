package console

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func filtered(t *testing.T, chunks ...string) string {
	t.Helper()
	var out bytes.Buffer
	f := NewFilter(&out)
	for _, c := range chunks {
		n, err := f.Write([]byte(c))
		require.NoError(t, err)
		require.Equal(t, len(c), n)
	}
	require.NoError(t, f.Close())
	return out.String()
}

func TestFilterRemovesTerminalControls(t *testing.T) {
	for name, tc := range map[string]struct{ in, want string }{
		"text without control sequences":                 {"Linux version 6.1\n\tüñ世\n", "Linux version 6.1\n\tüñ世\n"},
		"serial line ends":                               {"a\r\nb\r\r\nc\r\n", "a\nb\nc\n"},
		"a line that is overwritten":                     {"10%\r20%\r100%\r\n", "10%\n20%\n100%\n"},
		"a return on an empty line":                      {"\rLogin: ", "Login: "},
		"colours":                                        {"[\x1b[32m  OK  \x1b[0m] Reached", "[  OK  ] Reached"},
		"colours before the line's end":                  {"red\r\x1b[0m\nnext", "red\nnext"},
		"cursor and screen":                              {"\x1b[2J\x1b[1;1Hhome\x1b[?25l", "home"},
		"a title, ended by BEL":                          {"a\x1b]0;evil\x07b", "ab"},
		"a title, ended by ST":                           {"a\x1b]0;evil\x1b\\b", "ab"},
		"a request that a terminal replies to":           {"a\x1bP$q\"p\x1b\\b\x1b[6nc", "abc"},
		"PM, APC and SOS":                                {"a\x1b^x\x1b\\b\x1b_x\x1b\\c\x1bXx\x1b\\d", "abcd"},
		"C1 instead of ESC":                              {"a\u009b31mb\u009d0;t\u009cc\u0085d", "abcd"},
		"a byte that is not UTF-8":                       {"a\x9b31mb", "a\ufffd31mb"},
		"character sets":                                 {"a\x1b(0b\x1b%Gc\x1b7d", "abcd"},
		"a sequence inside of a sequence":                {"a\x1b[3\x1b[31mb", "ab"},
		"a cancelled sequence":                           {"a\x1b[3\x18b", "ab"},
		"BEL, backspace, NUL and DEL":                    {"a\x07b\x08c\x00d\x7fe", "abcde"},
		"ESC before a character that begins no sequence": {"a\x1bäb\x1b[1öc", "aäböc"},
		"a newline ends a title":                         {"a\x1b]0;never ended\npanic", "a\npanic"},
		"an unfinished sequence":                         {"a\x1b[3", "a"},
		"an unfinished character":                        {"a\xe4\xb8", "a\ufffd\ufffd"},
		"a sequence without end":                         {"a\x1b]" + strings.Repeat("x", maxSequence+1) + "b", "axxb"},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, filtered(t, tc.in)) })
	}
}

type broken struct{}

var errBroken = errors.New("pipe broken")

func (broken) Write([]byte) (int, error) { return 0, errBroken }

func TestFilterReturnsWriteError(t *testing.T) {
	_, err := NewFilter(broken{}).Write([]byte("text"))
	require.ErrorIs(t, err, errBroken)
}

// FuzzFilter checks that the output for any input is valid UTF-8 without control characters other than newline and tab,
// does not depend on how the input is split into writes, and does not change when it is filtered again.
func FuzzFilter(f *testing.F) {
	for _, s := range []string{"plain\n", "\x1b[31mred\x1b[0m\r\n", "\x1b]0;t\x07", "\u009b1m", "\xe4\xb8\x96\x9b", "a\rb\r\n", "\x1bP\n\x1b"} {
		f.Add([]byte(s), 3)
	}
	f.Fuzz(func(t *testing.T, in []byte, at int) {
		whole := filtered(t, string(in))
		require.True(t, utf8.ValidString(whole))
		for _, r := range whole {
			require.False(t, r < 0x20 && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0, "%q came out of %q", r, in)
		}
		at = min(max(at, 0), len(in))
		require.Equal(t, whole, filtered(t, string(in[:at]), string(in[at:])))
		bytewise := make([]string, len(in))
		for i, b := range in {
			bytewise[i] = string([]byte{b})
		}
		require.Equal(t, whole, filtered(t, bytewise...))
		require.Equal(t, whole, filtered(t, whole), "filtered text must not change when it is filtered again")
	})
}

package kv

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzTxn checks that parseTxn returns, for any input, a transaction that etcd's client can send or an error that
// contains the line number.
func FuzzTxn(f *testing.F) {
	for _, text := range []string{
		"mod(\"k\") > \"0\"\n\nput k v\nget k --prefix\n\ndel k --prev-kv\n", "value(k) = v", "lease(\"k\") != \"ff\"\n\nput a 'b c' --lease 1\n", "\n\n\n\n",
		"mod(\"\\x\") = \"1\"", "create(k) < -1", "\nput \"a\\\"b\" ''", "\nget --from-key --limit=2 x y", "\nput -- -a -b", "mod(k) = 99999999999999999999",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := parseTxn(strings.NewReader(text))
		if err != nil {
			require.Nil(t, got)
			return
		}
		require.NotZero(t, len(got.conditions)+len(got.success)+len(got.failure))
	})
}

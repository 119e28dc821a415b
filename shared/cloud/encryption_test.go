package cloud

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestKeysAreHidden checks that no way to write a key, or a value that contains one, shows bytes of the key.
func TestKeysAreHidden(t *testing.T) {
	s := ESPState{SPI: 300}
	for i := range s.Key {
		s.Key[i] = 'K'
	}
	p := EncryptedPeer{Send: s, Receive: []ESPState{s}}
	u := NetworkUpdate{Encryption: []EncryptedPeer{p}}
	var out bytes.Buffer
	for _, value := range []any{s.Key, &s.Key, s, &s, p, &p, u, &u, []ESPState{s}} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%X", "%d", "%q"} {
			fmt.Fprintf(&out, verb+"\n", value)
		}
		text, err := json.Marshal(value)
		require.NoError(t, err)
		out.Write(text)
		slog.New(slog.NewTextHandler(&out, nil)).Info("text", "value", value)
		slog.New(slog.NewJSONHandler(&out, nil)).Info("json", "value", value)
		fmt.Fprintln(&out, errors.New(fmt.Sprint(value)))
	}
	text := out.String()
	require.Contains(t, text, "[key]")
	for _, key := range []string{"KKK", "4b4b", "4B4B", "75 75", "0x4b", "S0tL"} {
		require.NotContains(t, text, key)
	}
}

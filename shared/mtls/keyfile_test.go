package mtls

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLoadOrMakeKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.key")
	made, err := LoadOrMakeKey(path)
	require.NoError(t, err)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())
	loaded, err := LoadOrMakeKey(path)
	require.NoError(t, err)
	require.Equal(t, made, loaded)

	_, err = LoadOrMakeKey(filepath.Join(t.TempDir(), "missing", "a.key"))
	require.ErrorContains(t, err, "write key: ")
}

func TestDamagedKeyFileIsKept(t *testing.T) {
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(other)
	require.NoError(t, err)
	for text, want := range map[string]string{
		"":  "is damaged: it contains no PEM",
		"x": "is damaged: it contains no PEM",
		string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("x")})): "is damaged: ",
		string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})):         "is not an Ed25519 key",
	} {
		path := filepath.Join(t.TempDir(), "a.key")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		_, err := LoadOrMakeKey(path)
		require.ErrorContains(t, err, want)
		kept, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, text, string(kept))
	}
}

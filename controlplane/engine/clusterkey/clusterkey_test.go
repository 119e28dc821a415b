package clusterkey

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	made, err := LoadOrMake(path)
	require.NoError(t, err)
	again, err := LoadOrMake(path)
	require.NoError(t, err)
	require.Equal(t, made.secret, again.secret)

	require.NoError(t, os.Chmod(path, 0o640))
	_, err = Load(path)
	require.ErrorContains(t, err, "chmod 600")
	_, err = LoadOrMake(path)
	require.Error(t, err, "LoadOrMake does not replace an existing key file")

	for _, bad := range []string{"", "AAAA", "not base64 at all"} {
		_, err := Parse(bad)
		require.ErrorContains(t, err, "keygen")
	}
}

func TestPurposesDiffer(t *testing.T) {
	k := Generate()
	require.Equal(t, k.Derive("a"), k.Derive("a"))
	require.NotEqual(t, k.Derive("a"), k.Derive("b"))
	require.Less(t, k.ClusterID(), uint64(1)<<53)
	require.NotZero(t, k.ClusterID())
}

func TestSealedSecretStaysWithItsName(t *testing.T) {
	k := Generate()
	sealed := k.Seal("key/1", []byte("secret"))
	plain, err := k.Open("key/1", sealed)
	require.NoError(t, err)
	require.Equal(t, "secret", string(plain))
	_, err = k.Open("key/2", sealed)
	require.Error(t, err)
	sealed[len(sealed)-1] ^= 1
	_, err = k.Open("key/1", sealed)
	require.Error(t, err)
	_, err = Generate().Open("key/1", k.Seal("key/1", nil))
	require.Error(t, err)
}

// TestRenewed checks that a renewed key has another cluster ID and authority, decrypts data that was encrypted with the
// old key, and can be encoded and parsed.
func TestRenewed(t *testing.T) {
	old := Generate()
	sealed := old.Seal("token", []byte("secret"))
	renewed, err := Parse(old.Renewed().Encode())
	require.NoError(t, err)
	require.NotEqual(t, old.ClusterID(), renewed.ClusterID())
	plain, err := renewed.Open("token", sealed)
	require.NoError(t, err)
	require.Equal(t, "secret", string(plain))
	a, err := old.Authority()
	require.NoError(t, err)
	b, err := renewed.Authority()
	require.NoError(t, err)
	require.NotEqual(t, a.Certificate().RawSubjectPublicKeyInfo, b.Certificate().RawSubjectPublicKeyInfo)
	again, err := Parse(renewed.Encode())
	require.NoError(t, err)
	require.Equal(t, renewed.ClusterID(), again.ClusterID())
	for _, bad := range []string{old.Encode()[:20], strings.TrimSpace(old.Encode()) + " xyz", strings.TrimSpace(old.Encode()) + " 1 2"} {
		_, err := Parse(bad)
		require.ErrorContains(t, err, "not a cluster key")
	}
}

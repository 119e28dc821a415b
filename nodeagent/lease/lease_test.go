package lease

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLease(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lease")
	open := func() *Lease {
		t.Helper()
		l, err := Open(path)
		require.NoError(t, err)
		return l
	}
	l := open()
	require.False(t, l.Valid(), "a host that never had a lease")
	require.NoError(t, l.Renew(Now()-time.Hour, 30*time.Second))
	require.False(t, l.Valid(), "an acknowledgement that arrives after the lease has ended")
	sent := Now()
	require.NoError(t, l.Renew(sent, time.Hour))
	require.True(t, l.Valid())
	require.NoError(t, l.Renew(sent-time.Hour, time.Minute))
	require.True(t, l.Valid(), "an older acknowledgement does not shorten the lease")
	require.True(t, open().Valid(), "a restarted agent")

	data, err := os.ReadFile(path)
	require.NoError(t, err)
	for name, content := range map[string]string{
		"cut off": string(data[:len(data)/2]), "empty": "", "of another boot": `{"boot":"4f1b","until":9223372036854775807}`,
	} {
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		require.False(t, open().Valid(), "a file that is %s", name)
	}
}

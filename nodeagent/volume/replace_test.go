package volume

import (
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestFileIsReplacedWhileOpened opens a file again and again while other goroutines replace it, as the record of a
// snapshot is replaced. Each open must return the old or the new file.
func TestFileIsReplacedWhileOpened(t *testing.T) {
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	p := &Pool{dir: dir}
	require.NoError(t, os.WriteFile(p.path("record"), nil, 0o600))
	stop := make(chan struct{})
	var writers sync.WaitGroup
	writers.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if os.WriteFile(p.path("next"), nil, 0o600) != nil || os.Rename(p.path("next"), p.path("record")) != nil {
				return
			}
		}
	})
	defer func() { close(stop); writers.Wait() }()
	for range 20_000 {
		f, err := p.openFile("record", unix.O_RDONLY)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
}

package tunnel

import (
	"io"
	"testing"

	"github.com/prometheus/procfs"
	"github.com/stretchr/testify/require"
)

// BenchmarkMemoryStream sends data through both tunnel processes over loopback. It reports the processor time that each
// process needs per GiB: one connection cannot be faster than one GiB in the larger of these times.
func BenchmarkMemoryStream(b *testing.B) {
	h := newHosts(b)
	h.start()
	near, err := Dial(b.Context(), h.source.Dir, Memory)
	require.NoError(b, err)
	defer near.Close()
	const chunk = 1 << 20
	data := make([]byte, chunk)
	cpu := func(dir string) float64 {
		s, _, err := Find(dir)
		require.NoError(b, err)
		p, err := procfs.NewProc(s.PID)
		require.NoError(b, err)
		stat, err := p.Stat()
		require.NoError(b, err)
		return stat.CPUTime()
	}
	done := make(chan error, 1)
	b.SetBytes(chunk)
	source, target := cpu(h.source.Dir), cpu(h.target.Dir)
	b.ResetTimer()
	go func() {
		_, err := io.CopyN(io.Discard, h.memory, int64(b.N)*chunk)
		done <- err
	}()
	for range b.N {
		if _, err := near.Write(data); err != nil {
			b.Fatal(err)
		}
	}
	require.NoError(b, <-done)
	b.StopTimer()
	gib := float64(b.N) * chunk / (1 << 30)
	b.ReportMetric((cpu(h.source.Dir)-source)/gib, "source-cpu-s/GiB")
	b.ReportMetric((cpu(h.target.Dir)-target)/gib, "target-cpu-s/GiB")
}

package robustness

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"go.etcd.io/etcd/tests/v3/robustness/traffic"
)

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Println("the robustness tests need root: run them with sudo, or leave out this package")
		os.Exit(1)
	}
	inside, code, err := EnterNamespaces()
	if err != nil {
		fmt.Println(err)
	}
	if !inside || err != nil {
		os.Exit(code)
	}
	os.Exit(m.Run())
}

// defaultDuration is the duration of a run without ROBUSTNESS_SECONDS: one round for each kind of traffic.
const defaultDuration = 30 * time.Second

// duration returns the environment variable ROBUSTNESS_SECONDS as a duration, or defaultDuration if it is not set.
func duration(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("ROBUSTNESS_SECONDS")
	if text == "" {
		return defaultDuration
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err, "ROBUSTNESS_SECONDS")
	return time.Duration(n) * time.Second
}

// seed returns the environment variable ROBUSTNESS_SEED, or a seed from the time if it is not set.
func seed(t *testing.T) uint64 {
	t.Helper()
	text := os.Getenv("ROBUSTNESS_SEED")
	if text == "" {
		return uint64(time.Now().UnixNano())
	}
	n, err := strconv.ParseUint(text, 10, 64)
	require.NoError(t, err, "ROBUSTNESS_SEED")
	return n
}

// trivet returns the control plane in the directory TRIVET_BIN, or builds it if that is not set.
func trivet(t *testing.T) Trivet {
	t.Helper()
	if dir := os.Getenv("TRIVET_BIN"); dir != "" {
		path, err := filepath.Abs(filepath.Join(dir, "trivet-controlplane"))
		require.NoError(t, err)
		return Trivet{Binary: path}
	}
	return Trivet{Binary: build(t)}
}

// build builds the control plane and returns its path.
func build(t *testing.T, flags ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "trivet-controlplane")
	c := exec.Command("go", append(append([]string{"build", "-trimpath"}, flags...), "-o", path, "./controlplane")...)
	c.Dir, c.Env = "../../../..", append(os.Environ(), "CGO_ENABLED=0")
	out, err := c.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

// newRound returns the round for a seed. The traffic is EtcdPutDeleteLease for even seeds and Kubernetes for odd seeds.
func newRound(t *testing.T, server Server, seed uint64) Round {
	t.Helper()
	random := rand.New(rand.NewPCG(seed, 0))
	r := Round{Server: server, Dir: t.TempDir(), Seed: seed, Traffic: traffic.EtcdPutDeleteLease, Compact: random.IntN(3) == 0}
	if seed%2 == 1 {
		r.Traffic = traffic.Kubernetes
	}
	r.Faults = DrawFaults(random, 3)
	if text := os.Getenv("ROBUSTNESS_FAULTS"); text != "" {
		r.Faults = strings.Split(text, ",")
	}
	return r
}

// runRound runs a round and logs its outcome. If it fails, its logs are copied to the directory ROBUSTNESS_KEEP.
func runRound(t *testing.T, r Round) (Outcome, error) {
	t.Helper()
	log, err := os.Create(filepath.Join(r.Dir, "round.log"))
	require.NoError(t, err)
	defer log.Close()
	r.Log = zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(zap.NewDevelopmentEncoderConfig()), zapcore.AddSync(log), zapcore.InfoLevel))
	began := time.Now()
	out, err := r.Run(t.Context())
	t.Logf("seed %d: %T, compaction %v, %q: %+v in %.0f s", r.Seed, r.Traffic, r.Compact, r.Faults, out, time.Since(began).Seconds())
	if err != nil {
		t.Logf("%v\n%s", err, strings.Join(slices.DeleteFunc(strings.Split(tail(log.Name()), "\n"), func(line string) bool {
			return strings.Contains(line, "Watch channel closed")
		}), "\n"))
		keepLogs(t, r)
	}
	return out, err
}

func keepLogs(t *testing.T, r Round) {
	t.Helper()
	dir := os.Getenv("ROBUSTNESS_KEEP")
	if dir == "" {
		return
	}
	files, err := filepath.Glob(filepath.Join(r.Dir, "*.log"))
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d-%s", r.Seed, filepath.Base(file))), text, 0o600))
	}
}

// runRounds runs rounds for the time run, but at least one for each kind of traffic. No round may break a guarantee.
func runRounds(t *testing.T, server Server, run time.Duration) {
	t.Helper()
	first, end := seed(t), time.Now().Add(run)
	decided := 0
	for n := uint64(0); n < 2 || time.Now().Before(end); n++ {
		t.Run(strconv.FormatUint(first+n, 10), func(t *testing.T) {
			out, err := runRound(t, newRound(t, server, first+n))
			if errors.Is(err, ErrUndecided) {
				return
			}
			decided++
			require.NoError(t, err)
			require.Greater(t, out.Succeeded, out.Failed, "more requests failed than succeeded")
			require.Greater(t, out.Succeeded, 100)
			require.Greater(t, out.Events, 100)
			require.Greater(t, out.Persisted, 50)
		})
		if t.Failed() {
			return
		}
	}
	require.Positive(t, decided)
}

// TestRobustness checks that Trivet breaks no guarantee in rounds of faults, for ROBUSTNESS_SECONDS.
func TestRobustness(t *testing.T) { runRounds(t, trivet(t), duration(t)) }

package main

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/creditbench/books"
	"github.com/trivet-cloud/trivet/e2e/kvbench/load"
	"github.com/trivet-cloud/trivet/e2e/usage"
)

// purse is a bank in memory, for tests, that reports a CPU time of one microsecond per pair.
type purse struct {
	mu       sync.Mutex
	books    books.Books
	asked    map[string]int // the number of pairs by wallet
	callers  []int          // the arguments of all calls of Connect
	fail     bool
	loseOnce bool // makes the next Pair return nil without changing the ledger
}

func (p *purse) Fill(_ context.Context, wallets []string, deposit int64) error {
	n := int64(len(wallets))
	p.books = books.Books{Wallets: n, Transactions: n, Deposited: n * deposit, Balance: n * deposit}
	p.asked = map[string]int{}
	return nil
}

func (p *purse) Connect(_ context.Context, callers int) error {
	p.callers = append(p.callers, callers)
	return nil
}

func (p *purse) Pair(_ context.Context, _ int, wallet string, amount int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fail {
		return errors.New("no money")
	}
	p.asked[wallet]++
	if p.loseOnce {
		p.loseOnce = false
		return nil
	}
	p.books.Transactions += 2
	p.books.Reservations++
	p.books.Consumed += amount
	p.books.Balance -= amount
	return nil
}

func (p *purse) Books(context.Context) (books.Books, error) { return p.books, nil }

func (p *purse) Usage() (usage.Sample, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return usage.Sample{CPU: time.Duration(p.books.Reservations) * time.Microsecond}, nil
}

func (p *purse) PIDs() ([]int, error) { return nil, nil }
func (p *purse) Close() error         { return nil }

func small() *bench {
	return &bench{
		parts: partNames, kinds: kindNames, rounds: 1, results: results{}, callers: map[string]int{},
		size: size{20, 5, time.Millisecond, 4 * time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 500 * time.Millisecond, []int{2, 3}},
	}
}

// TestTurnMeasuresBank runs the load of a turn against a bank that uses 1 µs of CPU time per pair. It checks that each
// row has its figures, and that the second round uses the numbers of callers that the first one chose.
func TestTurnMeasuresBank(t *testing.T) {
	b, p := small(), &purse{}
	require.NoError(t, b.measure(t.Context(), ours, 0, p))
	for _, row := range []string{"hot", "many", "open"} {
		require.InDelta(t, 1, b.results[key(row, cpu, ours)][0], 0.001, row)
		require.Len(t, b.results[key(row, p99, ours)], 1, row)
	}
	for _, row := range []string{"hot", "many"} {
		require.Positive(t, b.results[key(row, rate, ours)][0])
		require.Contains(t, []int{2, 3}, b.callers[key(row, ours)])
	}
	require.Positive(t, p.asked["hot"])
	require.Greater(t, len(p.asked), 1, "the load must use several wallets")
	require.Equal(t, []int{2, 3}, p.callers[:2])
	require.Equal(t, openCallers, p.callers[len(p.callers)-1])

	swept := len(p.callers)
	require.NoError(t, b.measure(t.Context(), ours, 1, p))
	require.Equal(t, 3, len(p.callers)-swept, "the second round must not search for the number of callers")
	require.Len(t, b.results[key("hot", rate, ours)], 2)
}

func TestTurnWithWrongSumsDoesNotCount(t *testing.T) {
	b := small()
	require.ErrorContains(t, b.measure(t.Context(), peer, 0, &purse{loseOnce: true}), "do not add up: transactions")
	require.Empty(t, b.results)
	require.ErrorContains(t, b.measure(t.Context(), peer, 0, &purse{fail: true}), "pairs failed: no money")
	require.Empty(t, b.results)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, b.measure(ctx, peer, 0, &purse{}), context.Canceled)
}

func TestFewestCallersNearTheHighestRate(t *testing.T) {
	require.Equal(t, 16, best(map[int]float64{4: 189, 16: 191, 64: 200, 256: 150}))
	require.Equal(t, 256, best(map[int]float64{4: 10, 256: 150}))
}

func TestRateCountsFromFirstRequestToLastAnswer(t *testing.T) {
	at := func(ms int) time.Time { return time.Unix(0, 0).Add(time.Duration(ms) * time.Millisecond) }
	require.InDelta(t, 6, rateOf(load.Answers{{Due: at(100), Done: at(500)}, {Due: at(0), Done: at(200)}, {Due: at(200), Done: at(400)}}), 1e-9)
	require.Zero(t, rateOf(nil))
}

func TestParseVerify(t *testing.T) {
	found, err := parseVerify(`goos: linux
BenchmarkVerify/seen           	   58806	     12684 ns/op	     78843 tokens/s
BenchmarkVerify/new-2          	   10000	     57951 ns/op	     17256.5 tokens/s
BenchmarkVerify/go-oidc-2 	   10000	     75882 ns/op	     1.3e+04 tokens/s
BenchmarkIssue/new 	   10000	     75882 ns/op	     3 tokens/s
PASS
`)
	require.NoError(t, err)
	require.Equal(t, []verified{{"seen", 1, 78843}, {"new", 2, 17256.5}, {"go-oidc", 2, 13000}}, found)
	_, err = parseVerify("PASS\n")
	require.ErrorContains(t, err, "printed no rates")
}

func TestRowsIncludeUnmeasuredTargets(t *testing.T) {
	b := small()
	b.results.add("hot", rate, ours, 3000)
	b.results.add("hot", rate, peer, 1000)
	b.results.add("hot", rate, trio, 500)
	b.callers[key("hot", ours)], b.callers[key("hot", peer)] = 64, 16
	text := b.text("")
	require.Contains(t, text, "| pairs on one wallet | 3000 /s | 1000 /s | 3.00 × | ≥ 2000 /s | aim met | 64 callers, PostgreSQL 16 |")
	require.Contains(t, text, "| three members: pairs on one wallet | 500 /s |  |  |  |  |  |")
	require.Contains(t, text, "| 500 pairs a second on 1,000 wallets: p99 |  |  |  | ≤ 20 ms | not measured |  |", "a target without a measurement is shown")
	b.parts = []string{"trio"}
	require.NotContains(t, b.text(""), "not measured |")
	b.Failures = []string{"it broke"}
	require.True(t, strings.HasSuffix(b.text(""), "- failed: it broke"))
	b.parts = []string{"pairs"}
	text = b.text("other processes used 90 % of a core during the run")
	require.Contains(t, text, "| pairs on one wallet | 3000 /s | 1000 /s | 3.00 × |  |  | 64 callers, PostgreSQL 16 |")
	require.NotRegexp(t, "met|missed|not measured", text)
	require.Contains(t, text, "**No verdict: other processes used 90 % of a core during the run. The figures must not be used.**")
}

func TestLinesAreUniqueAndOfAPart(t *testing.T) {
	seen := map[string]bool{}
	for _, table := range tables {
		for _, l := range table.lines {
			require.True(t, slices.Contains(partNames, l.part), l.part)
			k := key(l.row, l.metric, l.kind, l.peer)
			require.False(t, seen[k], "%s %s of %s is listed twice", l.row, l.metric, l.kind)
			seen[k] = true
		}
	}
}

func TestCheck(t *testing.T) {
	require.NoError(t, small().check())
	b := small()
	b.parts = []string{"pair"}
	require.ErrorContains(t, b.check(), `no part "pair"; there are pairs, trio, verify`)
	b = small()
	b.kinds = []string{"mysql"}
	require.ErrorContains(t, b.check(), `no kind "mysql"; there are trivet, postgres, trio`)
	b = small()
	b.rounds = 0
	require.ErrorContains(t, b.check(), "one round at least")
}

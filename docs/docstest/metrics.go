package docstest

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
)

// Metrics fails t unless the table under the heading "## program" in the Markdown file page has exactly one row for
// each metric of the registries in all. Metrics of the Go runtime and of the process need no row. gathered has the
// metrics that a running program served. For metrics in gathered, Metrics also compares the type. If rewrite is true,
// Metrics writes the table instead.
//
// A row has the cells name, type, labels and meaning. The meaning is the help text of the metric. The unit is the end of
// the name, as Prometheus recommends.
func Metrics(t *testing.T, page, program string, all []*prometheus.Registry, gathered []*dto.MetricFamily, rewrite bool) {
	t.Helper()
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	before, section, ok := strings.Cut(string(text), "\n## "+program+"\n")
	require.True(t, ok, "%s has no heading ## %s", page, program)
	section, rest, more := strings.Cut(section, "\n## ")
	documented := map[string]string{}
	for _, line := range strings.Split(section, "\n") {
		if m := metricRow.FindStringSubmatch(line); m != nil {
			documented[m[1]] = line
		}
	}
	types := map[string]string{}
	for _, f := range gathered {
		types[f.GetName()] = strings.ToLower(f.GetType().String())
	}
	want := map[string]string{}
	for _, d := range describe(t, all) {
		kind := types[d.name]
		switch {
		case kind != "":
		case slices.Contains(histogramsWithoutSamples, d.name):
			kind = "histogram"
		case strings.HasSuffix(d.name, "_total"):
			kind = "counter"
		default:
			kind = "gauge"
		}
		want[d.name] = fmt.Sprintf("| `%s` | %s | %s | %s |", d.name, kind, d.labels, d.help)
	}
	for name := range types {
		require.True(t, want[name] != "" || standard(name),
			"the program serves the metric %s, but no registry describes it", name)
	}
	if !rewrite {
		require.Equal(t, want, documented, "the table in docs/metrics.md is out of date: run this test with -rewrite")
		return
	}
	head, _, _ := strings.Cut(section, "\n| metric |")
	rows := []string{"| metric | type | labels | meaning |", "|---|---|---|---|"}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		rows = append(rows, want[name])
	}
	out := before + "\n## " + program + "\n" + strings.TrimRight(head, "\n") + "\n\n" + strings.Join(rows, "\n") + "\n"
	if more {
		out += "\n## " + rest
	}
	require.NoError(t, os.WriteFile(page, []byte(out), 0o644))
}

// histogramsWithoutSamples are the histograms of which the programs of the tests have no sample. The description of a
// metric does not contain its type.
var histogramsWithoutSamples = []string{"etcd_network_peer_round_trip_time_seconds", "trivet_http_request_duration_seconds"}

var (
	metricRow  = regexp.MustCompile("^\\| `([a-z0-9_]+)` \\| ([a-z]+) \\|")
	descFields = regexp.MustCompile(`^Desc\{fqName: "(.*?)", help: "(.*?)"(?:, unit: ".*")?, constLabels: \{.*\}, variableLabels: \{(.*)\}\}$`)
)

type description struct{ name, help, labels string }

// describe returns the descriptions of all metrics of the registries except the standard ones.
func describe(t *testing.T, all []*prometheus.Registry) (out []description) {
	t.Helper()
	ch := make(chan *prometheus.Desc)
	go func() {
		defer close(ch)
		for _, r := range all {
			r.Describe(ch)
		}
	}()
	for d := range ch {
		m := descFields.FindStringSubmatch(d.String()) // Desc has no other way to read its fields
		require.NotNil(t, m, "%s", d)
		if standard(m[1]) {
			continue
		}
		labels := "–"
		if m[3] != "" {
			labels = "`" + strings.ReplaceAll(m[3], ",", "`, `") + "`"
		}
		out = append(out, description{m[1], strings.ReplaceAll(m[2], `\"`, `"`), labels})
	}
	return out
}

// standard reports whether name is a metric of the Go runtime or of the process, which docs/metrics.md does not list.
func standard(name string) bool {
	return strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_")
}

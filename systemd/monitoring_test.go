package systemd_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMonitoringByPromtool checks the configuration and the alert rules of monitoring/ with promtool, and runs the
// tests of the alert rules.
func TestMonitoringByPromtool(t *testing.T) {
	promtool := tool(t, "promtool")
	for _, args := range [][]string{
		{"check", "config", "--syntax-only", "prometheus.yml"}, {"check", "rules", "trivet.rules.yml"}, {"test", "rules", "trivet.rules.test.yml"},
	} {
		cmd := exec.Command(promtool, args...)
		cmd.Dir = "monitoring"
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "promtool %s: %s", strings.Join(args, " "), out)
	}
}

var (
	metricName = regexp.MustCompile(`\b(?:trivet|etcd|grpc_server)_[a-z0-9_]+`)
	suffix     = regexp.MustCompile(`_(bucket|sum|count)$`)
)

// TestMonitoringNamesMetrics checks that the alert rules and the dashboard use only metrics of docs/metrics.md, and that
// promtool accepts each expression of the dashboard.
func TestMonitoringNamesMetrics(t *testing.T) {
	page, err := os.ReadFile("../docs/metrics.md")
	require.NoError(t, err)
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)`").FindAllStringSubmatch(string(page), -1) {
		documented[m[1]] = true
	}
	rules, err := os.ReadFile("monitoring/trivet.rules.yml")
	require.NoError(t, err)
	text := string(rules)
	expressions := dashboardExpressions(t)
	require.NotEmpty(t, expressions)
	text += strings.Join(expressions, "\n")
	names := metricName.FindAllString(text, -1)
	require.NotEmpty(t, names)
	for _, name := range names {
		require.True(t, documented[name] || documented[suffix.ReplaceAllString(name, "")], "%s is not in docs/metrics.md", name)
	}
	promtool := tool(t, "promtool")
	type rule struct {
		Record string `json:"record"`
		Expr   string `json:"expr"`
	}
	var all []rule
	for _, e := range expressions {
		all = append(all, rule{"dashboard:panel", e})
	}
	file := filepath.Join(t.TempDir(), "dashboard.yml") // JSON is YAML
	content, err := json.Marshal(map[string]any{"groups": []any{map[string]any{"name": "dashboard", "rules": all}}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, content, 0o600))
	out, err := exec.Command(promtool, "check", "rules", "--lint=none", file).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// dashboardExpressions returns the PromQL expressions of the Grafana dashboard. It fails t if two panels have the same
// ID, or a panel without a title or an expression exists.
func dashboardExpressions(t *testing.T) (out []string) {
	t.Helper()
	text, err := os.ReadFile("monitoring/trivet.dashboard.json")
	require.NoError(t, err)
	var dashboard struct {
		Panels []struct {
			ID          int
			Type, Title string
			Targets     []struct{ Expr string }
		}
	}
	require.NoError(t, json.Unmarshal(text, &dashboard))
	ids := map[int]bool{}
	for _, p := range dashboard.Panels {
		require.False(t, ids[p.ID], "two panels have the ID %d", p.ID)
		ids[p.ID] = true
		require.NotEmpty(t, p.Title)
		require.Equal(t, p.Type == "row", len(p.Targets) == 0, p.Title)
		for _, target := range p.Targets {
			out = append(out, target.Expr)
		}
	}
	return out
}

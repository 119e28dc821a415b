package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/stretchr/testify/require"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// scrapeToken is the content of the file metrics_token of the members.
const scrapeToken = "a token of more than 16 bytes"

func (w *world) scrapeTokenFile() string { return w.dir.Path("scrape-token") }

// scraped makes the members serve their metrics on port 9101 over TLS with a token, from their next start on. It can be an
// argument of newWorld.
func scraped(w *world) {
	require.NoError(w.t, os.Mkdir(w.dir.Path("tls"), 0o755))
	w.renew()
	w.own(w.dir.Path("tls"))
	require.NoError(w.t, os.WriteFile(w.scrapeTokenFile(), []byte(scrapeToken+"\n"), 0o600))
	require.NoError(w.t, os.Chown(w.scrapeTokenFile(), lab.UID, lab.UID))
	w.trio.Env = func(id int) []string {
		address := w.trio.Members[id] + ":9101"
		return []string{
			"TRIVET_METRICS_LISTEN=" + address, "TRIVET_METRICS_ADDRESS=" + address, "TRIVET_METRICS_TOKEN=" + filepath.Base(w.scrapeTokenFile()),
			"TRIVET_METRICS_CERT=tls/tls.crt", "TRIVET_METRICS_KEY=tls/tls.key", // relative, because members run as another user
		}
	}
}

// discovered is a target that Prometheus has found, with the labels that the test's configuration copies.
type discovered struct{ Health, Role, Host, Version, State string }

// discover lets Prometheus find the members and the agents at /targets of two members, and scrape them. A changed state of
// a host must appear in its label.
func (c *networkCloud) discover() {
	program := testenv.Program(c.t, "prometheus")
	ctx := c.context(3 * time.Minute)
	secure := map[string]any{"ca_file": c.caFile()}
	// Without the type, Prometheus 2.42 sends no type in the requests for targets.
	token := map[string]any{"type": "Bearer", "credentials_file": c.scrapeTokenFile()}
	job := func(role string) map[string]any {
		var sources []any
		for _, member := range []int{1, 2} {
			url := fmt.Sprintf("https://%s:9101/targets?role=%s", c.trio.Members[member], role)
			sources = append(sources, map[string]any{"url": url, "refresh_interval": "1s", "tls_config": secure, "authorization": token})
		}
		var copies []any
		for _, name := range []string{"role", "host", "version", "state"} {
			copies = append(copies, map[string]any{"source_labels": []string{"__meta_trivet_" + name}, "target_label": name})
		}
		return map[string]any{"job_name": "trivet-" + role, "http_sd_configs": sources, "tls_config": secure, "authorization": token, "relabel_configs": copies}
	}
	config, err := json.Marshal(map[string]any{ // JSON is YAML
		"global": map[string]any{"scrape_interval": "1s"}, "scrape_configs": []any{job("member"), job("agent")},
	})
	require.NoError(c.t, err)
	dir := c.t.TempDir()
	require.NoError(c.t, os.WriteFile(filepath.Join(dir, "prometheus.yml"), config, 0o600))
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(c.t, err)
	address := free.Addr().String()
	require.NoError(c.t, free.Close())
	var log bytes.Buffer
	cmd := exec.Command(program, "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+address)
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(c.t, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill() // Wait reports whether the process has ended
		_ = cmd.Wait()
		if c.t.Failed() {
			c.t.Log(log.String())
		}
	}()

	want := map[string]discovered{}
	members, err := c.admin.Operator.ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
	require.NoError(c.t, err)
	for id, ip := range c.trio.Members {
		want[ip+":9101"] = discovered{"up", "member", fmt.Sprintf("node-%d", id), members.GetVersion(), "VOTER"}
	}
	for i, agent := range c.hosts {
		host, err := c.admin.Nodes.GetNode(ctx, &vmv1.GetNodeRequest{NodeId: c.ids[i]})
		require.NoError(c.t, err)
		want[agent.Metrics] = discovered{"up", "agent", agent.Name, host.GetAgentVersion(), "READY"}
	}
	found := func(ctx context.Context) error {
		got, err := discoveredTargets(ctx, "http://"+address)
		if err == nil && fmt.Sprint(got) != fmt.Sprint(want) {
			err = fmt.Errorf("found %v, want %v", got, want)
		}
		return err
	}
	require.NoError(c.t, lab.Until(ctx, "Prometheus scrapes all members and agents", found))
	_, err = c.admin.Nodes.CordonNode(ctx, &vmv1.CordonNodeRequest{NodeId: c.ids[0]})
	require.NoError(c.t, err)
	cordoned := want[c.hosts[0].Metrics]
	cordoned.State = "CORDONED"
	want[c.hosts[0].Metrics] = cordoned
	require.NoError(c.t, lab.Until(ctx, "the label has the new state of the host", found))
	_, err = c.admin.Nodes.UncordonNode(ctx, &vmv1.UncordonNodeRequest{NodeId: c.ids[0]})
	require.NoError(c.t, err)

	client := lab.HTTPS(c.authority())
	defer client.CloseIdleConnections()
	for path, status := range map[string]int{"/targets": http.StatusUnauthorized, "/metrics": http.StatusUnauthorized} {
		answer, err := client.Get("https://" + c.trio.Members[1] + ":9101" + path)
		require.NoError(c.t, err)
		require.NoError(c.t, answer.Body.Close())
		require.Equal(c.t, status, answer.StatusCode, "%s without a token", path)
	}
}

// discoveredTargets returns the targets of the Prometheus at a URL, by address.
func discoveredTargets(ctx context.Context, url string) (map[string]discovered, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/api/v1/targets?state=active", nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	var body struct {
		Data struct {
			ActiveTargets []struct {
				Health, LastError string
				Labels            map[string]string
			}
		}
	}
	if err := json.NewDecoder(answer.Body).Decode(&body); err != nil {
		return nil, fmt.Errorf("read the targets of Prometheus: %w", err)
	}
	out := map[string]discovered{}
	for _, one := range body.Data.ActiveTargets {
		l := one.Labels
		if _, twice := out[l["instance"]]; twice {
			return nil, fmt.Errorf("the target %s is scraped twice", l["instance"])
		}
		out[l["instance"]] = discovered{one.Health, l["role"], l["host"], l["version"], l["state"]}
	}
	return out, nil
}

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/facts"
	"github.com/trivet-cloud/trivet/nodeagent/metrics"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

const testScrapeToken = "a token of more than 16 bytes"

// metricsConfig returns the settings of an agent with a self-signed certificate for 127.0.0.1 and a token for /metrics.
func metricsConfig(t *testing.T) Config {
	t.Helper()
	dir := t.TempDir()
	c := Default()
	c.ControlPlane, c.Name = []string{"127.0.0.1"}, "rack-1"
	c.MetricsCert, c.MetricsKey, c.MetricsToken = filepath.Join(dir, "cert"), filepath.Join(dir, "key"), filepath.Join(dir, "token")
	writeCertificate(t, &c, 1)
	require.NoError(t, os.WriteFile(c.MetricsToken, []byte(testScrapeToken+"\n"), 0o600))
	require.NoError(t, c.Validate())
	return c
}

// writeCertificate writes a new certificate with a serial number to the files of c.
func writeCertificate(t *testing.T, c *Config, serial int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "metrics"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	for path, block := range map[string]*pem.Block{
		c.MetricsCert: {Type: "CERTIFICATE", Bytes: der}, c.MetricsKey: {Type: "PRIVATE KEY", Bytes: private},
	} {
		require.NoError(t, os.WriteFile(path, pem.EncodeToMemory(block), 0o600))
	}
}

// startMetrics serves the metrics of an agent with the settings c until the test ends, and returns the address. The
// values of the metrics are constant.
func startMetrics(t *testing.T, c *Config) string {
	t.Helper()
	secure, err := c.scrapePort().TLS()
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	sources := metrics.Sources{
		Version: "v1", Uplink: func() metrics.Uplink { return metrics.Uplink{Connected: true} }, VMs: func() []metrics.VM { return nil },
		Counts: func() metrics.Counts { return metrics.Counts{} }, Networks: func() metrics.Networks { return metrics.Networks{} },
		Storage: func() metrics.Storage { return metrics.Storage{} }, Images: func() metrics.Images { return metrics.Images{} },
		Host:      func() facts.Load { return facts.Load{} },
		Durations: metrics.NewDurations(),
	}
	handler := metrics.Handler(sources, metrics.Access{Hosts: c.metricsHosts(), Token: c.scrapePort().ReadToken()}, slog.New(slog.DiscardHandler))
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, listener, secure, handler) }()
	t.Cleanup(func() { stop(); require.NoError(t, <-ended) })
	return listener.Addr().String()
}

// TestMetricsOverTLS checks that a renewed certificate is used without a restart, and that plaintext and requests
// without the token are refused.
func TestMetricsOverTLS(t *testing.T) {
	c := metricsConfig(t)
	address := startMetrics(t, &c)
	serial := func() int64 {
		conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true})
		require.NoError(t, err)
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	require.EqualValues(t, 1, serial())
	writeCertificate(t, &c, 2)
	require.EqualValues(t, 2, serial())

	answer, err := http.Get("http://" + address + "/metrics")
	require.NoError(t, err)
	answer.Body.Close()
	require.Equal(t, http.StatusBadRequest, answer.StatusCode)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	answer, err = client.Get("https://" + address + "/metrics")
	require.NoError(t, err)
	answer.Body.Close()
	require.Equal(t, http.StatusUnauthorized, answer.StatusCode)

	require.NoError(t, os.WriteFile(c.MetricsToken, []byte("short"), 0o600))
	_, err = c.scrapePort().ReadToken()()
	require.ErrorContains(t, err, "fewer than 16 bytes")
	c.MetricsKey = c.MetricsToken
	_, err = c.scrapePort().TLS()
	require.ErrorContains(t, err, "read metrics_cert and metrics_key")
}

// TestAgentGoesOnWithoutMetrics starts to serve metrics without a certificate. The function must not return before its
// context ends, because the agent stops when it returns.
func TestAgentGoesOnWithoutMetrics(t *testing.T) {
	c := metricsConfig(t)
	c.MetricsListen = "127.0.0.1:0"
	require.NoError(t, os.Remove(c.MetricsCert))
	log, text := io.Pipe()
	a := &agent{config: c, log: slog.New(slog.NewTextHandler(text, nil))}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan struct{})
	go func() { defer close(ended); a.serveMetrics(ctx) }()
	line, err := bufio.NewReader(log).ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, line, "the agent tries again")
	require.Contains(t, line, "read metrics_cert and metrics_key")
	select {
	case <-ended:
		t.Fatal("serveMetrics has returned")
	default:
	}
	stop()
	<-ended
}

// TestPrometheusScrapesAgents lets Prometheus read the metrics of three agents over TLS with a token. A fourth agent
// requires another token. Prometheus must report this target as down.
func TestPrometheusScrapesAgents(t *testing.T) {
	program := testenv.Program(t, "prometheus")
	c := metricsConfig(t)
	var targets []string
	for range 3 {
		targets = append(targets, startMetrics(t, &c))
	}
	other := c
	other.MetricsToken = filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(other.MetricsToken, []byte(testScrapeToken+"!"), 0o600))
	refusing := startMetrics(t, &other)

	dir := t.TempDir()
	config, err := json.Marshal(map[string]any{ // JSON is YAML
		"global": map[string]any{"scrape_interval": "1s", "scrape_timeout": "1s"},
		"scrape_configs": []any{map[string]any{
			"job_name": "trivet-agents", "scheme": "https", "tls_config": map[string]string{"ca_file": c.MetricsCert},
			"authorization": map[string]string{"credentials_file": c.MetricsToken}, "static_configs": []any{map[string]any{"targets": append(targets, refusing)}},
		}},
	})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "prometheus.yml"), config, 0o600))
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := free.Addr().String()
	require.NoError(t, free.Close())
	var log bytes.Buffer
	cmd := exec.Command(program, "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+address)
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // Wait reports whether the process has ended
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	want := map[string]string{refusing: "down server returned HTTP status 401 Unauthorized"}
	for _, one := range targets {
		want[one] = "up "
	}
	require.EventuallyWithT(t, func(t *assert.CollectT) {
		found, err := prometheusTargets("http://" + address)
		require.NoError(t, err)
		require.Equal(t, want, found)
	}, 30*time.Second, 100*time.Millisecond)
}

// prometheusTargets returns the health and the last error of each target of the Prometheus at a URL, by address.
func prometheusTargets(url string) (map[string]string, error) {
	answer, err := http.Get(url + "/api/v1/targets?state=active")
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	var body struct {
		Data struct {
			ActiveTargets []struct{ ScrapeURL, Health, LastError string }
		}
	}
	if err := json.NewDecoder(answer.Body).Decode(&body); err != nil {
		return nil, fmt.Errorf("read the targets of Prometheus: %w", err)
	}
	out := map[string]string{}
	for _, one := range body.Data.ActiveTargets {
		host, _, _ := strings.Cut(strings.TrimPrefix(one.ScrapeURL, "https://"), "/")
		out[host] = one.Health + " " + one.LastError
	}
	return out, nil
}

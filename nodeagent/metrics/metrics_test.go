package metrics

import (
	"encoding/json"
	"errors"
	"flag"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/docs/docstest"
	"github.com/trivet-cloud/trivet/nodeagent/facts"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func sources() Sources {
	durations := NewDurations()
	durations.Launch.Observe(0.3)
	durations.Launch.Observe(7)
	durations.Build.Observe(40)
	durations.Stop.Observe(601)
	return Sources{
		Durations: durations,
		Version:   "v1",
		Uplink: func() Uplink {
			return Uplink{Connected: true, Term: 3, Lease: 12500 * time.Millisecond, Certificate: time.Unix(1800000000, 0)}
		},
		VMs: func() []VM {
			return []VM{
				{ID: "a", Observed: cloud.ObservedRunning, CPU: 1500 * time.Millisecond, Usage: &cloud.Usage{
					MemoryMiB: 2, DiskReadBytes: 7, NetworkReceivedBytes: 12, NetworkTransmitBytes: 13,
				}},
				{ID: "b", Observed: cloud.ObservedBuilt},
				{ID: "c", Observed: 99},
			}
		},
		Counts: func() Counts { return Counts{Launches: 4, Deaths: 1} },
		Networks: func() Networks {
			return Networks{Failures: 2, Repairs: 3, ApplyTime: 1500 * time.Millisecond, VPCs: []VPC{
				{ID: "v", Ports: 5, Rules: 7, Failed: true, Filter: &Filter{
					Drops: []Drop{{"spoof", 8}, {"group", 9}}, Connections: 10, ConnectionLimit: 11,
				}},
				{ID: "new", Ports: 1},
			}}
		},
		Storage: func() Storage {
			return Storage{Pools: []Pool{{"local", 100, 40}}, Volumes: []Volume{
				{ID: "d", Bytes: 20, Allocated: 4, IO: &VolumeIO{ReadBytes: 1, WrittenBytes: 2, Reads: 3, Writes: 5}},
				{ID: "e", Failed: true},
			}, Snapshots: 6, FailedSnapshots: 1}
		},
		Host: func() facts.Load {
			return facts.Load{MemoryBytes: 1000, AvailableBytes: 600, CPUSeconds: map[string]float64{"user": 3, "idle": 8}}
		},
		Images: func() Images {
			return Images{Images: 2, Bytes: 300, Limit: 400, Fetches: 5, FetchFailures: 1, FetchedBytes: 600, Evictions: 7}
		},
	}
}

func serve(t *testing.T) *httptest.Server {
	s := httptest.NewServer(Handler(sources(), Access{Hosts: []string{"Rack-1", "rack-1.example"}}, slog.New(slog.DiscardHandler)))
	t.Cleanup(s.Close)
	return s
}

func get(t *testing.T, url string) (int, string) {
	r, err := http.Get(url)
	require.NoError(t, err)
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	return r.StatusCode, string(body)
}

func TestMetrics(t *testing.T) {
	s := serve(t)
	status, body := get(t, s.URL+"/metrics")
	require.Equal(t, 200, status)
	for _, line := range []string{
		`trivet_agent_build_info{version="v1"} 1`, `trivet_agent_uplink_connected 1`, `trivet_agent_lease_seconds 12.5`, `trivet_agent_certificate_expiry_timestamp_seconds 1.8e+09`,
		`trivet_agent_vms{observed="running"} 1`, `trivet_agent_vms{observed="ended"} 0`,
		`trivet_agent_launch_duration_seconds_bucket{le="0.25"} 0`, `trivet_agent_launch_duration_seconds_bucket{le="0.5"} 1`,
		`trivet_agent_launch_duration_seconds_sum 7.3`, `trivet_agent_launch_duration_seconds_count 2`,
		`trivet_agent_build_duration_seconds_bucket{le="30"} 0`, `trivet_agent_build_duration_seconds_bucket{le="60"} 1`,
		`trivet_agent_stop_duration_seconds_bucket{le="600"} 0`, `trivet_agent_stop_duration_seconds_sum 601`,
		`trivet_agent_launches_total{result="ok"} 4`, `trivet_agent_guest_deaths_total 1`,
		`trivet_agent_vm_cpu_seconds_total{vm="a"} 1.5`, `trivet_agent_vm_memory_bytes{vm="a"} 2.097152e+06`,
		`trivet_agent_vm_disk_read_bytes_total{vm="a"} 7`, `trivet_agent_vpc_applies_total{result="failed"} 2`, `trivet_agent_vpc_repairs_total 3`, `trivet_agent_vpc_apply_seconds_total 1.5`,
		`trivet_agent_vpc_ports{vpc="v"} 5`, `trivet_agent_vpc_rules{vpc="v"} 7`, `trivet_agent_vpc_failed{vpc="v"} 1`,
		`trivet_agent_vpc_dropped_packets_total{reason="spoof",vpc="v"} 8`, `trivet_agent_vpc_dropped_packets_total{reason="group",vpc="v"} 9`,
		`trivet_agent_vpc_connections{vpc="v"} 10`, `trivet_agent_vpc_connection_limit{vpc="v"} 11`,
		`trivet_agent_vm_network_received_bytes_total{vm="a"} 12`, `trivet_agent_vm_network_sent_bytes_total{vm="a"} 13`,
		`trivet_agent_pool_bytes{pool="local"} 100`, `trivet_agent_pool_free_bytes{pool="local"} 40`,
		`trivet_agent_volume_bytes{volume="d"} 20`, `trivet_agent_volume_allocated_bytes{volume="d"} 4`,
		`trivet_agent_volume_failed{volume="e"} 1`, `trivet_agent_volume_read_bytes_total{volume="d"} 1`,
		`trivet_agent_volume_written_bytes_total{volume="d"} 2`, `trivet_agent_volume_reads_total{volume="d"} 3`,
		`trivet_agent_volume_writes_total{volume="d"} 5`,
		`trivet_agent_image_cache_images 2`, `trivet_agent_image_cache_bytes 300`, `trivet_agent_image_cache_limit_bytes 400`,
		`trivet_agent_image_fetches_total{result="ok"} 4`, `trivet_agent_image_fetches_total{result="failed"} 1`,
		`trivet_agent_image_fetched_bytes_total 600`, `trivet_agent_image_cache_evictions_total 7`,
		`trivet_agent_snapshots_total{result="made"} 6`, `trivet_agent_snapshots_total{result="failed"} 1`,
		`trivet_agent_host_memory_bytes 1000`, `trivet_agent_host_memory_available_bytes 600`,
		`trivet_agent_host_cpu_seconds_total{mode="user"} 3`, `trivet_agent_host_cpu_seconds_total{mode="idle"} 8`,
		`go_goroutines`, `process_resident_memory_bytes`,
	} {
		require.Contains(t, body, line)
	}
	require.NotContains(t, body, `vm="b"`)
	require.NotContains(t, body, `trivet_agent_volume_reads_total{volume="e"}`)
}

var rewrite = flag.Bool("rewrite", false, "write the table of docs/metrics.md")

// TestMetricsPage compares docs/metrics.md with the metrics of the agent.
func TestMetricsPage(t *testing.T) {
	registry := newRegistry(sources())
	gathered, err := registry.Gather()
	require.NoError(t, err)
	docstest.Metrics(t, "../../docs/metrics.md", "Agents", []*prometheus.Registry{registry}, gathered, *rewrite)
}

func TestHealth(t *testing.T) {
	s := serve(t)
	status, body := get(t, s.URL+"/health")
	require.Equal(t, 200, status)
	var answer struct {
		Data struct{ Status string }
		Meta struct {
			RequestID string    `json:"request_id"`
			Timestamp time.Time `json:"timestamp"`
		}
	}
	require.NoError(t, json.Unmarshal([]byte(body), &answer))
	require.Equal(t, "healthy", answer.Data.Status)
	require.Len(t, answer.Meta.RequestID, 36)
	require.False(t, answer.Meta.Timestamp.IsZero())
	status, _ = get(t, s.URL+"/other")
	require.Equal(t, 404, status)
	r, err := http.Post(s.URL+"/health", "text/plain", nil)
	require.NoError(t, err)
	r.Body.Close()
	require.Equal(t, 405, r.StatusCode)
}

// TestForeignNamesAreRefused checks that requests whose Host header is none of this host's names get status 403 and no
// metrics. Otherwise a web page could read the metrics by rebinding its own DNS name to this host's address.
func TestForeignNamesAreRefused(t *testing.T) {
	s := serve(t)
	for host, want := range map[string]int{
		"evil.com": 403, "evil.com:7444": 403, "127.0.0.1.nip.io": 403, "rack-1.evil.com": 403, "localhost.evil.com:7444": 403,
		"127.0.0.1:7444": 200, "192.0.2.7": 200, "[::1]:7444": 200, "[2001:db8::1]": 200, "localhost:7444": 200, "LOCALHOST": 200,
		"rack-1": 200, "RACK-1:7444": 200, "rack-1.example:7444": 200,
	} {
		for _, path := range []string{"/metrics", "/health"} {
			r, err := http.NewRequest(http.MethodGet, s.URL+path, nil)
			require.NoError(t, err)
			r.Host = host
			answer, err := http.DefaultClient.Do(r)
			require.NoError(t, err)
			body, err := io.ReadAll(answer.Body)
			require.NoError(t, err)
			answer.Body.Close()
			require.Equal(t, want, answer.StatusCode, "%s%s", host, path)
			if want == 403 {
				require.NotContains(t, string(body), "trivet_agent")
				require.Contains(t, string(body), "metrics_hosts")
			}
		}
	}
}

// TestToken checks that requests for metrics need the token, and that health checks do not.
func TestToken(t *testing.T) {
	token, failure := "0123456789abcdef", error(nil)
	access := Access{Token: func() (string, error) { return token, failure }}
	s := httptest.NewServer(Handler(sources(), access, slog.New(slog.DiscardHandler)))
	t.Cleanup(s.Close)
	status := func(path, authorization string) int {
		r, err := http.NewRequest(http.MethodGet, s.URL+path, nil)
		require.NoError(t, err)
		if authorization != "" {
			r.Header.Set("Authorization", authorization)
		}
		answer, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		body, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		answer.Body.Close()
		require.Equal(t, path == "/metrics" && answer.StatusCode == 200, strings.Contains(string(body), "trivet_agent_vms"))
		return answer.StatusCode
	}
	for authorization, want := range map[string]int{
		"": 401, "Bearer": 401, "Bearer ": 401, "Bearer 0123456789abcde": 401, "Bearer 0123456789abcdefg": 401, "Basic 0123456789abcdef": 401,
		"0123456789abcdef": 401, "Bearer 0123456789abcdef": 200,
	} {
		require.Equal(t, want, status("/metrics", authorization), "request for metrics with the header %q", authorization)
		require.Equal(t, 200, status("/health", authorization), authorization)
	}
	token = "another token of 16 bytes"
	require.Equal(t, 401, status("/metrics", "Bearer 0123456789abcdef"))
	require.Equal(t, 200, status("/metrics", "Bearer "+token))
	failure = errors.New("no file")
	require.Equal(t, 500, status("/metrics", "Bearer "+token))
}

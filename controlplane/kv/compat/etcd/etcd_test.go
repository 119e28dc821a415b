package main

import (
	"crypto/tls"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPlanOfThree checks the configuration that is made from the flags with which etcd's end-to-end framework starts a
// member of a cluster of three.
func TestPlanOfThree(t *testing.T) {
	o, err := parse(strings.Fields(`--name=b --listen-client-urls=https://localhost:20005 --advertise-client-urls=https://localhost:20005
		--listen-peer-urls=https://localhost:20006 --initial-advertise-peer-urls=https://localhost:20006 --initial-cluster-token=new
		--data-dir=/d --snapshot-count=10000 --quota-backend-bytes=53248 --cert-file c.crt --key-file c.key --trusted-ca-file ca.crt
		--client-cert-auth --peer-cert-file p.crt --heartbeat-interval 80 --strict-reconfig-check=false --logger=zap --auth-token=jwt,sign-method=RS256,ttl=3s
		--initial-cluster=a=https://localhost:20001,b=https://localhost:20006,c=https://localhost:20011 --initial-cluster-state=new`))
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"snapshot-count", "peer-cert-file", "advertise-client-urls", "logger"}, o.ignored)
	p, err := newPlan(o)
	require.NoError(t, err)
	text, err := p.config(p.id())
	require.NoError(t, err)
	require.Equal(t, `node_id: 2
listen: 127.93.78.38
data_dir: /d
cluster:
    1: 127.93.78.33
    2: 127.93.78.38
    3: 127.93.78.43
cluster_key: /d/cluster.key
tick: 80ms
kv:
    etcd_listen:
        - localhost:20005
    etcd_trust_loopback: true
    etcd_cert: c.crt
    etcd_key: c.key
    etcd_client_ca: ca.crt
    quota: 53248
    token_ttl: 3s
    strict_reconfig: false
`, string(text))
	require.Empty(t, p.forwards)
}

// TestPlanOfJoiningMember checks that a joining member forwards the peer address in its flags to its own address.
func TestPlanOfJoiningMember(t *testing.T) {
	o, err := parse(strings.Fields(`--name=d --listen-peer-urls=http://localhost:20016 --initial-cluster-state=existing
		--initial-cluster=d=http://localhost:20016,a=http://localhost:20001`))
	require.NoError(t, err)
	p, err := newPlan(o)
	require.NoError(t, err)
	require.Equal(t, []forward{{"tcp", "localhost:20016", "127.93.78.48:2380"}}, p.forwards)
	seeds, err := p.seeds()
	require.NoError(t, err)
	require.Equal(t, []string{"127.93.78.33:50051"}, seeds)
}

// TestPlanWithSocket checks that a UNIX socket in the flags is forwarded to a port of the member, and that a
// certificate is created for --auto-tls without certificate files.
func TestPlanWithSocket(t *testing.T) {
	o, err := parse(strings.Fields(`--name=a --data-dir=` + t.TempDir() + ` --listen-client-urls=unixs://localhost:20000 --auto-tls
		--listen-peer-urls=http://localhost:20001 --initial-cluster=a=http://localhost:20001`))
	require.NoError(t, err)
	p, err := newPlan(o)
	require.NoError(t, err)
	require.Equal(t, []forward{{"unix", "localhost:20000", "127.93.78.33:2379"}}, p.forwards)
	args, err := p.prepare()
	require.NoError(t, err)
	require.Equal(t, []string{"--config", p.configFile()}, args)
	_, err = tls.LoadX509KeyPair(p.autoCert(), p.autoKey())
	require.NoError(t, err)
}

func TestMemberHost(t *testing.T) {
	for peer, want := range map[string]string{
		"http://localhost:2380": "127.93.9.76", "https://127.0.0.1:2380": "127.93.9.76", "http://127.0.0.2:2380": "127.0.0.2",
		"http://10.1.2.3:2380": "10.1.2.3", "http://example.org:2380": "", "http://localhost": "",
	} {
		u, err := url.Parse(peer)
		require.NoError(t, err)
		got, err := memberHost(u)
		require.Equal(t, want, got, peer)
		require.Equal(t, want == "", err != nil, peer)
	}
}

func TestParseRefuses(t *testing.T) {
	for _, line := range []string{"stray", "--initial-cluster=a=http://localhost:1 --name=b", "--initial-cluster=a", "--listen-peer-urls=nonsense"} {
		_, err := parse(strings.Fields(line))
		require.Error(t, err, line)
	}
}

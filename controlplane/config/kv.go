package config

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/controlplane/kv/users"
)

// KV configures the key-value store and its etcd API.
type KV struct {
	// Open lets every caller who can reach the gRPC port read and write keys without a credential. Requests that change
	// members or users still need one.
	Open bool `yaml:"open"`
	// EtcdListen lists addresses (host:port) that serve what an etcd server serves, for etcd's clients: gRPC, /health,
	// /version and /metrics.
	EtcdListen []string `yaml:"etcd_listen"`
	// EtcdCert and EtcdKey are the paths of the certificate and key for EtcdListen. If they are empty, EtcdListen is
	// plaintext.
	EtcdCert string `yaml:"etcd_cert"`
	EtcdKey  string `yaml:"etcd_key"`
	// EtcdClientCA is the path of the CA certificates for clients of EtcdListen, which must then present a certificate.
	// Until etcd's Auth is enabled, every holder of such a certificate may change the members, so issue them to
	// operators only. Once Auth is enabled, the common name is the user of a client without a token.
	EtcdClientCA string `yaml:"etcd_client_ca"`
	// EtcdTrustLoopback lets every process of this host change the members and etcd's users through EtcdListen without
	// a credential until etcd's Auth is enabled, as etcd does. Use it for etcd's test suites only, because any local
	// process can then stop the cluster. EtcdListen must be on loopback.
	EtcdTrustLoopback bool `yaml:"etcd_trust_loopback"`
	// Quota is the maximum number of bytes that the keys with their history may use. A negative value means no limit.
	Quota int64 `yaml:"quota"`
	// CompactAge is how long old revisions are available. 0 means that they are available until a client compacts them,
	// as in etcd.
	CompactAge time.Duration `yaml:"compact_age"`
	// CorruptCheck is the pause between two comparisons of all members' keys and values. Each comparison reads all
	// keys. 0 means that they are never compared.
	CorruptCheck time.Duration `yaml:"corrupt_check"`
	// StrictReconfig makes this member apply etcd's rules of --strict-reconfig-check to requests of etcd's clients to
	// add or remove members. A request is refused if too few voting members have been in contact with the leader for
	// five seconds.
	StrictReconfig bool `yaml:"strict_reconfig"`
	// MaxRequestBytes is the maximum size, in bytes, of a request that writes. MaxTxnOps is the maximum number of
	// operations in a transaction.
	MaxRequestBytes int `yaml:"max_request_bytes"`
	MaxTxnOps       int `yaml:"max_txn_ops"`
	// WatchProgress is the interval of progress notifications to watches that requested them.
	WatchProgress time.Duration `yaml:"watch_progress"`
	// TokenTTL is the lifetime of the tokens that etcd's Auth issues.
	TokenTTL time.Duration `yaml:"token_ttl"`
	// BcryptCost is the bcrypt cost with which passwords of etcd's users are hashed.
	BcryptCost int `yaml:"bcrypt_cost"`
}

// Upper limits of the settings MaxRequestBytes and MaxTxnOps:
const (
	// maxRequestBytes is the largest request that fits into one entry of the raft log. The size of a value is limited
	// to 1.5 MiB in any case.
	maxRequestBytes = 7 << 20
	maxTxnOps       = 10_000
)

// validate returns an error if a setting in KV is out of range or contradicts another. The error names the first such
// setting.
func (k *KV) validate() error {
	for _, address := range k.EtcdListen {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return fmt.Errorf("kv.etcd_listen: %w", err)
		}
	}
	if k.EtcdTrustLoopback && slices.ContainsFunc(k.EtcdListen, func(a string) bool { return !loopback(a) }) {
		return errors.New("kv.etcd_trust_loopback is for test suites: the addresses of etcd_listen must be on loopback")
	}
	switch {
	case (k.EtcdCert == "") != (k.EtcdKey == ""):
		return errors.New("kv: etcd_cert and etcd_key go together")
	case k.EtcdClientCA != "" && k.EtcdCert == "":
		return errors.New("kv: etcd_client_ca needs etcd_cert and etcd_key")
	case k.MaxRequestBytes < 1024 || k.MaxRequestBytes > maxRequestBytes:
		return fmt.Errorf("kv.max_request_bytes must be 1024 to %d, got %d", maxRequestBytes, k.MaxRequestBytes)
	case k.MaxTxnOps < 1 || k.MaxTxnOps > maxTxnOps:
		return fmt.Errorf("kv.max_txn_ops must be 1 to %d, got %d", maxTxnOps, k.MaxTxnOps)
	case k.WatchProgress < 100*time.Millisecond:
		return fmt.Errorf("kv.watch_progress must be 100ms or more, got %s", k.WatchProgress)
	case k.CompactAge < 0 || k.CompactAge > 0 && k.CompactAge < time.Second:
		return fmt.Errorf("kv.compact_age must be 0 or 1s and more, got %s", k.CompactAge)
	case k.CorruptCheck < 0 || k.CorruptCheck > 0 && k.CorruptCheck < time.Second:
		return fmt.Errorf("kv.corrupt_check must be 0 or 1s and more, got %s", k.CorruptCheck)
	case k.TokenTTL < time.Second:
		return fmt.Errorf("kv.token_ttl must be 1s or more, got %s", k.TokenTTL)
	case k.BcryptCost < users.MinCost || k.BcryptCost > users.MaxCost:
		return fmt.Errorf("kv.bcrypt_cost must be %d to %d, got %d", users.MinCost, users.MaxCost, k.BcryptCost)
	}
	return nil
}

// flags adds a flag for each setting in KV to f.
func (k *KV) flags(f *pflag.FlagSet) {
	f.BoolVar(&k.Open, "kv-open", k.Open, "let every client that reaches the gRPC port read and write keys")
	f.StringSliceVar(&k.EtcdListen, "kv-etcd-listen", k.EtcdListen, "address, as host:port, for clients of etcd: the member serves etcd's gRPC API and its HTTP endpoints there; repeatable; by default there is none")
	f.StringVar(&k.EtcdCert, "kv-etcd-cert", k.EtcdCert, "file with the TLS certificate chain of kv-etcd-listen; by default kv-etcd-listen is plaintext")
	f.StringVar(&k.EtcdKey, "kv-etcd-key", k.EtcdKey, "file with the private key of kv-etcd-cert")
	f.StringVar(&k.EtcdClientCA, "kv-etcd-client-ca", k.EtcdClientCA, "file with the certificate authorities of clients of kv-etcd-listen, which must then present a certificate; by default they need none")
	f.BoolVar(&k.EtcdTrustLoopback, "kv-etcd-trust-loopback", k.EtcdTrustLoopback, "let every process of this host change the members and etcd's users through kv-etcd-listen without a credential; for test suites")
	f.Int64Var(&k.Quota, "kv-quota", k.Quota, "bytes that keys and their history may take; negative: no limit")
	f.DurationVar(&k.CompactAge, "kv-compact-age", k.CompactAge, "how long history is kept; 0: until somebody compacts it")
	f.DurationVar(&k.CorruptCheck, "kv-corrupt-check", k.CorruptCheck, "time between comparisons of all members' keys; 0: never")
	f.BoolVar(&k.StrictReconfig, "kv-strict-reconfig", k.StrictReconfig, "refuse etcd's clients to add or remove members unless enough voters were in contact with the leader in the last 5s")
	f.IntVar(&k.MaxRequestBytes, "kv-max-request-bytes", k.MaxRequestBytes, "limit of a request that writes keys")
	f.IntVar(&k.MaxTxnOps, "kv-max-txn-ops", k.MaxTxnOps, "limit of a transaction's operations")
	f.DurationVar(&k.WatchProgress, "kv-watch-progress", k.WatchProgress, "time between notices to watches that asked for them")
	f.DurationVar(&k.TokenTTL, "kv-token-ttl", k.TokenTTL, "how long a token of etcd's Auth lives")
	f.IntVar(&k.BcryptCost, "kv-bcrypt-cost", k.BcryptCost, "cost of hashing passwords of etcd's Auth")
}

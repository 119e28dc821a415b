package etcdrpc

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/version"

	"github.com/trivet-cloud/trivet/controlplane/kv"
)

// HTTP returns the handler of etcd's HTTP paths other than gRPC: /health, /livez, /readyz, /version, and /metrics,
// which the given handler serves. /readyz fails until the key index is loaded, so that a rolling restart waits for it.
// As in etcd, the paths need no authorization.
func HTTP(service *kv.Service, metrics http.Handler) *Pages {
	p := &Pages{}
	p.add("/metrics", metrics.ServeHTTP)
	p.add("/version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{
			"etcdserver": version.Version, "etcdcluster": version.Cluster(version.Version) + ".0", "storage": version.Cluster(version.Version) + ".0",
		})
	})
	p.add("/health", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		except := func(a pb.AlarmType) bool { return slices.Contains(q["exclude"], a.String()) }
		if err := service.Check(r.Context(), q.Get("serializable") == "true", except); err != nil {
			writeJSON(w, http.StatusServiceUnavailable, health{"false", err.Error()})
			return
		}
		writeJSON(w, http.StatusOK, health{"true", ""})
	})
	for path, serializable := range map[string]bool{"/livez": true, "/readyz": false} {
		p.add(path, func(w http.ResponseWriter, r *http.Request) {
			// /livez ignores all alarms. /readyz ignores all alarms except CORRUPT: a member without space for new keys
			// still counts as ready.
			except := func(a pb.AlarmType) bool { return serializable || a != pb.AlarmType_CORRUPT }
			if err := service.Check(r.Context(), serializable, except); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			if !serializable && service.IsLearner() {
				http.Error(w, "not a voter", http.StatusServiceUnavailable)
				return
			}
			if err := service.CheckKeyIndex(); err != nil && !serializable {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintln(w, "ok")
		})
	}
	return p
}

// Pages is the HTTP handler for etcd's HTTP paths. The function HTTP creates it.
type Pages struct {
	mux   http.ServeMux
	paths []string
}

func (p *Pages) add(path string, h http.HandlerFunc) {
	p.paths = append(p.paths, path)
	p.mux.HandleFunc("GET "+path, h)
}

// ServeHTTP implements http.Handler.
func (p *Pages) ServeHTTP(w http.ResponseWriter, r *http.Request) { p.mux.ServeHTTP(w, r) }

// Paths returns all paths that p serves, for tests that request each of them.
func (p *Pages) Paths() []string { return p.paths }

type health struct {
	Health string `json:"health"`
	Reason string `json:"reason"`
}

func writeJSON(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// An error only means that the client has disconnected.
	_ = json.NewEncoder(w).Encode(body)
}

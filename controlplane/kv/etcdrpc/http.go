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

// HTTP answers what an etcd answers by HTTP beside its gRPC: /health, /livez, /readyz, /version, and /metrics by the
// handler that is given. A member is not ready before it counts keys without reading them: who restarts members one by one
// waits for that. As with etcd everybody may ask who reaches the port.
func HTTP(service *kv.Service, metrics http.Handler) *Pages {
	p := &Pages{}
	p.add("/metrics", metrics.ServeHTTP)
	p.add("/version", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, map[string]string{
			"etcdserver": version.Version, "etcdcluster": version.Cluster(version.Version) + ".0", "storage": version.Cluster(version.Version) + ".0",
		})
	})
	p.add("/health", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		except := func(a pb.AlarmType) bool { return slices.Contains(q["exclude"], a.String()) }
		if err := service.Check(r.Context(), q.Get("serializable") == "true", except); err != nil {
			answer(w, http.StatusServiceUnavailable, health{"false", err.Error()})
			return
		}
		answer(w, http.StatusOK, health{"true", ""})
	})
	for path, serializable := range map[string]bool{"/livez": true, "/readyz": false} {
		p.add(path, func(w http.ResponseWriter, r *http.Request) {
			// What is alive and ready does not depend on room for new keys.
			except := func(a pb.AlarmType) bool { return serializable || a != pb.AlarmType_CORRUPT }
			if err := service.Check(r.Context(), serializable, except); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			if !serializable && service.IsLearner() {
				http.Error(w, "not a voter", http.StatusServiceUnavailable)
				return
			}
			if err := service.Warm(); err != nil && !serializable {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintln(w, "ok")
		})
	}
	return p
}

// Pages are what HTTP answers.
type Pages struct {
	mux   http.ServeMux
	paths []string
}

func (p *Pages) add(path string, h http.HandlerFunc) {
	p.paths = append(p.paths, path)
	p.mux.HandleFunc("GET "+path, h)
}

// ServeHTTP makes Pages an http.Handler.
func (p *Pages) ServeHTTP(w http.ResponseWriter, r *http.Request) { p.mux.ServeHTTP(w, r) }

// Paths lists the pages, for the tests that walk all of them.
func (p *Pages) Paths() []string { return p.paths }

type health struct {
	Health string `json:"health"`
	Reason string `json:"reason"`
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// Whoever hung up is not told.
	_ = json.NewEncoder(w).Encode(body)
}

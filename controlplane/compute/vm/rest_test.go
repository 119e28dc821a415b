package vm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/openapi/openapitest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest/resttest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func (w *world) rest() *rest.Server {
	caller := func(user cloud.UserID, t cloud.Tenant, role cloud.Role) *cloud.Caller {
		return resttest.Bound(user, cloud.Tenant{}, resttest.Role(role, t))
	}
	r := resttest.NewServer(fault.VM, "vm", resttest.Callers{
		"ada": caller("ada", acme, cloud.ProjectMember), "eve": caller("eve", other, cloud.ProjectAdmin),
		"vic":      caller("vic", acme, cloud.ProjectViewer),
		"unproven": {User: "ada", Proof: cloud.ProofNone, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}},
		"admin":    resttest.Admin(),
	})
	w.vms.Routes(r)
	return r
}

var uuids = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}`)

var macs = regexp.MustCompile(`02(:[0-9a-f]{2}){5}`)

// TestREST runs scripts against the REST API of docs/api.md.
//
// `get|post|patch|delete PATH [as=TOKEN] [key=IDEMPOTENCY-KEY] [type=CONTENT-TYPE] [then=OBSERVATION] [error=TEXT]
// [query=PAGE-TOKEN]` makes a call with the lines below it as the body and prints the response. With then=, the VM's
// host reports that observation, with the error text, after the call has changed the VM. `host name= vcpus= mib= gib=`
// adds a host with that capacity; with the argument network, VMs on it can have NICs. `report vm= observed= [error=]`
// reports an observation of a VM as its host, and prints the VM's state.
//
// <name> stands for the ID of the VM or host with that name, in paths, bodies and printed responses. Other IDs are
// printed as <id>, and MAC addresses as <mac>.
func TestREST(t *testing.T) {
	datadriven.Walk(t, "testdata/rest", func(t *testing.T, path string) {
		w := newWorld(t)
		handler := openapitest.Handler(t, w.rest())
		ids := map[string]string{"image": string(w.image(1, 3<<30)), "nowhere": "00000000-0000-7000-8000-0000000000ff"}
		var names []string
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			expand := func(s string) string {
				for name, id := range ids {
					s = strings.ReplaceAll(s, "<"+name+">", id)
				}
				return s
			}
			arg := func(key string) (value string) { d.MaybeScanArgs(t, key, &value); return value }
			switch d.Cmd {
			case "host":
				var c cloud.Capacity
				d.ScanArgs(t, "vcpus", &c.VCPUs)
				d.ScanArgs(t, "mib", &c.MemoryMiB)
				d.ScanArgs(t, "gib", &c.StorageGiB)
				ids[arg("name")] = string(w.AddHost(arg("name"), c))
				if d.HasArg("network") {
					w.setNetwork(cloud.NodeID(ids[arg("name")]))
				}
				return ""
			case "report":
				vm := w.report(cloud.VMID(ids[arg("vm")]), levels[arg("observed")], func(o *cloud.Observation) { o.LastError = arg("error") })
				return vm.State.String()
			}
			path := expand(d.CmdArgs[0].Key)
			if q := arg("query"); q != "" {
				path += "?page_token=" + q
			}
			q := httptest.NewRequest(strings.ToUpper(d.Cmd), "http://127.0.0.1:8084"+path, strings.NewReader(expand(d.Input)))
			for header, value := range map[string]string{"Idempotency-Key": arg("key"), "Content-Type": arg("type")} {
				if value != "" {
					q.Header.Set(header, value)
				}
			}
			if as := arg("as"); as != "nobody" {
				q.Header.Set("Authorization", "Bearer "+map[bool]string{true: "ada", false: as}[as == ""])
			}
			if then := arg("then"); then != "" {
				id := cloud.VMID(strings.Split(path, "/")[4])
				before := w.get(id).Generation
				reported := make(chan struct{})
				go func() {
					defer close(reported)
					store.Await(t.Context(), w.store, VMs, func(vm *cloud.VM) (bool, error) { return vm.Generation > before, nil },
						string(acme.Project), string(id))
					w.report(id, levels[then], func(o *cloud.Observation) {
						if o.LastError = arg("error"); o.LastError != "" {
							o.Exit = cloud.ExitFailed
						}
					})
				}()
				defer func() { <-reported }()
			}
			a := httptest.NewRecorder()
			handler.ServeHTTP(a, q)
			var out map[string]any
			require.NoError(t, json.Unmarshal(a.Body.Bytes(), &out), a.Body)
			meta := out["meta"].(map[string]any)
			require.Len(t, meta, 2)
			id, err := uuid.Parse(meta["request_id"].(string))
			require.NoError(t, err)
			require.EqualValues(t, 4, id.Version())
			_, err = time.Parse(time.RFC3339, meta["timestamp"].(string))
			require.NoError(t, err)
			delete(out, "meta")
			if vm, ok := out["data"].(map[string]any); ok && vm["name"] != nil && a.Code == 201 {
				name := vm["name"].(string)
				if ids[name] != vm["id"].(string) {
					ids[name] = vm["id"].(string)
					names = append(names, name)
				}
			}
			var text bytes.Buffer
			e := json.NewEncoder(&text)
			e.SetEscapeHTML(false)
			require.NoError(t, e.Encode(out))
			w.AwaitFleet()
			answer := uuids.ReplaceAllStringFunc(text.String(), func(id string) string {
				for name, have := range ids {
					if have == id {
						return "<" + name + ">"
					}
				}
				return "<id>"
			})
			answer = macs.ReplaceAllString(answer, "<mac>")
			if a.Header().Get("Idempotency-Replayed") != "" {
				answer = "replayed " + answer
			}
			return fmt.Sprintf("%d %s", a.Code, answer)
		})
	})
}

var levels = map[string]cloud.Observed{
	"built": cloud.ObservedBuilt, "up": cloud.ObservedRunning, "ended": cloud.ObservedEnded, "build-failed": cloud.ObservedBuildFailed,
}

// FuzzCreateBody sends any bytes as the body of a create. It must either create a VM with a valid spec, or return an
// error of the wire contract that is not INTERNAL.
func FuzzCreateBody(f *testing.F) {
	w := newWorld(f)
	w.AddHost("h1", plenty())
	w.image(1, 1<<30)
	handler := openapitest.Handler(w.t, w.rest())
	for _, body := range []string{
		`{"name":"web"}`, `{"name":"web","vcpus":0}`, `{"name":"a","disks":[{"id":"a","source":{"type":"blank"},"size_gib":1}]}`,
		`{"name":"a","disks":[{"id":"a","source":{"type":"image","image_id":"00000000-0000-7000-8000-000000000001"}}]}`,
		`{"name":"a","network":[{}],"hypervisor":"kvm","memory_mib":512}`, `[]`, `null`, `{"name":"\u0000"}`, "{\"name\":\"\xff\"}",
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		w.t = t
		q := httptest.NewRequest("POST", "http://127.0.0.1/api/v1/vms", bytes.NewReader(body))
		q.Header.Set("Authorization", "Bearer ada")
		a := httptest.NewRecorder()
		handler.ServeHTTP(a, q)
		var out struct {
			Data  struct{ ID string }
			Error struct{ Code, Message string }
		}
		require.NoError(t, json.Unmarshal(a.Body.Bytes(), &out))
		switch a.Code {
		case 201:
			vm := w.get(cloud.VMID(out.Data.ID))
			spec := vm.Spec
			require.NoError(t, spec.Check(), "the spec in the record must be valid")
			w.deleteIfPresent(vm.ID)
		case 400, 403, 404, 409, 413, 422, 429:
			require.NotEmpty(t, out.Error.Message)
		default:
			t.Fatalf("%d %s", a.Code, a.Body)
		}
	})
}

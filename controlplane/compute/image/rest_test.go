package image

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/openapi/openapitest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest/resttest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func (w *world) rest(s *Service) *rest.Server {
	_, err := w.records.Update(w.t.Context(), func(tx *store.Tx) error {
		if _, err := tenant.CreateOrg(tx, "evil", ""); err != nil {
			return err
		}
		for _, org := range []cloud.OrgID{"acme", "evil"} {
			if _, err := tenant.CreateProject(tx, cloud.Tenant{Org: org, Project: cloud.ProjectID(org + "-p")}, "", tenant.Quota{}); err != nil {
				return err
			}
		}
		return nil
	})
	require.NoError(w.t, err)
	caller := func(user cloud.UserID, org cloud.OrgID, role cloud.Role) *cloud.Caller {
		t := cloud.Tenant{Org: org, Project: cloud.ProjectID(org + "-p")}
		return resttest.Bound(user, t, resttest.Role(role, t))
	}
	r := resttest.NewServer(fault.VM, "vm", resttest.Callers{
		"ada": caller("ada", "acme", cloud.ProjectMember), "vic": caller("vic", "acme", cloud.ProjectViewer),
		"eve": caller("eve", "evil", cloud.ProjectMember),
	})
	s.Routes(r)
	return r
}

var (
	restIDs   = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[47][0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}`)
	restTimes = regexp.MustCompile(`_at":[0-9]+`)
)

// TestREST runs scripts against the REST API of images in docs/api.md.
//
// `get|post|put|patch|delete PATH [as=TOKEN] [key=IDEMPOTENCY-KEY] [bytes=N]` makes a call with the lines below it, or
// N zero bytes, as the body, and prints the response. In PATH, ~ stands for =. `settled NAME` waits until an image is
// AVAILABLE or ERROR.
//
// <name> stands for the ID of the image with that name in paths and printed responses, and <name-session> for that of
// its upload session. Times are printed as 0, and the import directory as /import.
func TestREST(t *testing.T) {
	datadriven.Walk(t, "testdata/rest", func(t *testing.T, path string) {
		w := newWorld(t, 1)
		s := w.member(1)
		w.run(s)
		w.write("disk.raw", []byte("the bytes of an image"))
		handler := openapitest.Handler(t, w.rest(s))
		ids := map[string]string{"/import": w.imports}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			expand := func(text string) string {
				for name, id := range ids {
					text = strings.ReplaceAll(text, "<"+name+">", id)
				}
				return text
			}
			arg := func(key string) (value string) { d.MaybeScanArgs(t, key, &value); return value }
			if d.Cmd == "settled" {
				return w.settled(cloud.ImageID(ids[d.CmdArgs[0].Key])).Status.String()
			}
			body := []byte(expand(d.Input))
			if n, err := strconv.Atoi(arg("bytes")); err == nil {
				body = make([]byte, n)
			}
			path := strings.ReplaceAll(expand(d.CmdArgs[0].Key), "~", "=")
			q := httptest.NewRequest(strings.ToUpper(d.Cmd), "http://127.0.0.1:8084"+path, bytes.NewReader(body))
			if key := arg("key"); key != "" {
				q.Header.Set("Idempotency-Key", key)
			}
			if as := arg("as"); as != "nobody" {
				q.Header.Set("Authorization", "Bearer "+map[bool]string{true: "ada", false: as}[as == ""])
			}
			a := httptest.NewRecorder()
			handler.ServeHTTP(a, q)
			var out map[string]any
			require.NoError(t, json.Unmarshal(a.Body.Bytes(), &out), a.Body)
			delete(out, "meta")
			if a.Code == 201 {
				data := out["data"].(map[string]any)
				image := data
				if nested, ok := data["image"].(map[string]any); ok {
					image = nested
					ids[image["name"].(string)+"-session"] = data["upload_session_id"].(string)
				}
				ids[image["name"].(string)] = image["id"].(string)
			}
			var text bytes.Buffer
			e := json.NewEncoder(&text)
			e.SetEscapeHTML(false)
			require.NoError(t, e.Encode(out))
			answer := text.String()
			for name, id := range ids {
				answer = strings.ReplaceAll(answer, id, "<"+name+">")
			}
			answer = restTimes.ReplaceAllString(restIDs.ReplaceAllString(answer, "<id>"), `_at":0`)
			if a.Header().Get("Idempotency-Replayed") != "" {
				answer = "replayed " + answer
			}
			return fmt.Sprintf("%d %s", a.Code, answer)
		})
	})
}

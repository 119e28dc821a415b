package main

import (
	"encoding/json"
	"maps"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// TestHostilePages calls every method that lists by pages with page sizes out of range and with page tokens that the
// list did not return: invalid ones, one of another list, and a changed one. Every call must fail with
// INVALID_ARGUMENT.
func TestHostilePages(t *testing.T) {
	h := startMember(t)
	h.createResources()
	who := identityv1.NewIdentityServiceClient(h.public)
	of := func(org string) string {
		page := mustCall(h, who.ListAuditRecords, &identityv1.ListAuditRecordsRequest{OrgId: org, PageSize: 1})
		require.NotEmpty(t, page.GetNextPageToken())
		return page.GetNextPageToken()
	}
	theirs, all := of("acme"), of("")
	last := map[bool]string{true: "B", false: "A"}[theirs[len(theirs)/2] == 'A']
	changed := theirs[:len(theirs)/2] + last + theirs[len(theirs)/2+1:]
	rows := map[string]row{}
	for _, part := range [][]row{computeRows, identityRows, creditRows, networkRows} {
		for _, r := range part {
			rows[r.name] = r
		}
	}
	listed := 0
	for _, d := range h.listeners {
		if d.grpc == nil || byCertificate[d.name] != "" {
			continue
		}
		found, err := d.endpoints()
		require.NoError(t, err)
		conn := h.dial(d.address, insecure.NewCredentials())
		for _, e := range found {
			if e.class != ruled || !hasPages(t, e.name) {
				continue
			}
			listed++
			ask := func(field string, value any) {
				t.Helper()
				var body map[string]any
				require.NoError(t, json.Unmarshal([]byte(h.fillPlaceholders(rows[e.row].body, fillAsWritten)), &body))
				maps.Copy(body, map[string]any{field: value})
				text, err := json.Marshal(body)
				require.NoError(t, err)
				got, message := h.outcome(call{endpoint: e, conn: conn, token: h.adminToken(), body: string(text)})
				require.Equal(t, "INVALID_ARGUMENT", got, "%s with %s %v: %s", e.name, field, value, message)
				require.Contains(t, message, field, e.name)
			}
			for _, size := range []int32{-1, 1001, math.MaxInt32, math.MinInt32} {
				ask("page_size", size)
			}
			for _, token := range []string{"A", "../..", all, changed} {
				// The page token all comes from ListAuditRecords for the entire cloud, so it is valid for that method only.
				if e.name != identityService+"ListAuditRecords" || token != all {
					ask("page_token", token)
				}
			}
		}
	}
	require.GreaterOrEqual(t, listed, 14)
	_, err := who.ListAuditRecords(h.adminContext(), &identityv1.ListAuditRecordsRequest{OrgId: "rival", PageToken: theirs})
	require.ErrorContains(t, err, "page_token", "a page token of one org's records must not be valid for those of another")
}

// hasPages reports whether a method's request has the fields page_size and page_token.
func hasPages(t *testing.T, method string) bool {
	service, name := splitMethod(method)
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service + "." + name))
	require.NoError(t, err)
	fields := found.(protoreflect.MethodDescriptor).Input().Fields()
	return fields.ByName("page_size") != nil && fields.ByName("page_token") != nil
}

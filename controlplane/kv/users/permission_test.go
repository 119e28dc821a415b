package users

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// allStrings returns all strings of the letters with at most the given length, the shortest first.
func allStrings(letters string, length int) [][]byte {
	all := [][]byte{{}}
	for from := 0; length > 0; length-- {
		for _, w := range all[from:] {
			from++
			for i := range len(letters) {
				all = append(all, append(bytes.Clone(w), letters[i]))
			}
		}
	}
	return all
}

// contains reports whether a key is in the range [begin, end) of a request.
func contains(key, begin, end []byte) bool {
	if len(end) == 0 {
		return bytes.Equal(key, begin)
	}
	return bytes.Compare(key, begin) >= 0 && (bytes.Equal(end, []byte{0}) || bytes.Compare(key, end) < 0)
}

// TestRangePermissionsMatchSingleKeyModel checks that a range is readable if and only if every key in it is, and
// likewise for writing. It suffices to check all keys that are at most one letter longer than the range ends.
func TestRangePermissionsMatchSingleKeyModel(t *testing.T) {
	ends := allStrings("\x00ab", 2)
	keys := allStrings("\x00ab", 3)[1:]
	random := rand.New(rand.NewPCG(1, 2))
	var allowed, refused int
	for range 300 {
		var perms []*authpb.Permission
		for range random.IntN(5) {
			p := &authpb.Permission{Key: ends[random.IntN(len(ends))], RangeEnd: ends[random.IntN(len(ends))], PermType: authpb.Permission_Type(random.IntN(3))}
			if validPermission(p.Key, p.RangeEnd) {
				perms = append(perms, p)
			}
		}
		roles := map[string]*authpb.Role{"r1": {}, "r2": {}}
		for i, p := range perms {
			role := roles[fmt.Sprintf("r%d", 1+i%2)]
			role.KeyPermission = append(role.KeyPermission, p)
		}
		g := &grants{user: &authpb.User{Roles: []string{"r1", "r2", "gone"}}, roles: roles}

		may := func(key []byte, but authpb.Permission_Type) bool {
			for _, p := range perms {
				if p.PermType != but && contains(key, p.Key, p.RangeEnd) {
					return true
				}
			}
			return false
		}
		for _, key := range ends[1:] {
			for _, end := range ends {
				if len(end) > 0 && !isOpen(end) && bytes.Compare(key, end) >= 0 {
					continue
				}
				read, write := true, true
				for _, k := range keys {
					if contains(k, key, end) {
						read = read && may(k, authpb.Permission_WRITE)
						write = write && may(k, authpb.Permission_READ)
					}
				}
				s := spanOf(key, end)
				require.Equal(t, read, g.mayRead(s), "read [%q,%q) with %v", key, end, perms)
				require.Equal(t, write, g.mayWrite(s), "write [%q,%q) with %v", key, end, perms)
				if read {
					allowed++
				} else {
					refused++
				}
			}
		}
	}
	require.Greater(t, allowed, 1000)
	require.Greater(t, refused, 1000)
}

// TestMergeSpans checks which ranges merged permissions contain, with the cases of etcd's own test of its interval
// check and some others.
func TestMergeSpans(t *testing.T) {
	for _, c := range []struct {
		perms      [][2]string
		begin, end string
		want       bool
	}{
		{[][2]string{{"a", "c"}, {"x", "z"}}, "a", "z", false},
		{[][2]string{{"a", "f"}, {"c", "d"}, {"f", "z"}}, "a", "z", true},
		{[][2]string{{"a", "d"}, {"a", "b"}, {"c", "f"}}, "a", "f", true},
		{[][2]string{{"a", "d"}, {"a", "b"}, {"c", "f"}}, "a", "g", false},
		{[][2]string{{"a", "\x00"}}, "b", "\x00", true},
		{[][2]string{{"b", "\x00"}}, "a", "\x00", false},
		{[][2]string{{"a", "b"}, {"b", ""}}, "a", "b\x00", true},
		{[][2]string{{"a", "b"}, {"b", ""}}, "a", "c", false},
		{[][2]string{{"\x00", "\x00"}}, "\x00", "\x00", true},
		{[][2]string{{"a", "b"}, {"b", "c"}, {"d", "\x00"}}, "a", "\x00", false},
		{[][2]string{{"a", ""}}, "a", "", true},
		{[][2]string{{"a", ""}}, "a\x00", "", false},
		{[][2]string{{"a", "z"}}, "m", "c", true}, // the end is before the begin; both are inside
		{[][2]string{{"d", "z"}}, "m", "c", false},
		{[][2]string{{"a", "z"}}, "m", "m", true},
		{nil, "m", "c", false},
	} {
		var all []span
		for _, p := range c.perms {
			all = append(all, spanOf([]byte(p[0]), []byte(p[1])))
		}
		require.Equal(t, c.want, mergeSpans(all).contains(spanOf([]byte(c.begin), []byte(c.end))), "%q: [%q,%q)", c.perms, c.begin, c.end)
	}
}

func TestCanTxn(t *testing.T) {
	w := newWorld(t)
	w.enable()
	w.addUser("ann", "a")
	must(w, (*State).RoleAdd, &pb.AuthRoleAddRequest{Name: "r"})
	must(w, (*State).UserGrantRole, &pb.AuthUserGrantRoleRequest{User: "ann", Role: "r"})
	for key, kind := range map[string]authpb.Permission_Type{"read": authpb.Permission_READ, "write": authpb.Permission_WRITE, "both": authpb.Permission_READWRITE} {
		must(w, (*State).RoleGrantPermission, &pb.AuthRoleGrantPermissionRequest{Name: "r", Perm: &authpb.Permission{PermType: kind, Key: []byte(key)}})
	}
	s := w.state()
	get := func(key string) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte(key)}}}
	}
	put := func(key string, prev bool, lease int64) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key), PrevKv: prev, Lease: lease}}}
	}
	del := func(key string, prev bool) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte(key), PrevKv: prev}}}
	}
	txn := func(r *pb.TxnRequest) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: r}}
	}
	compare := func(key string) []*pb.Compare { return []*pb.Compare{{Key: []byte(key)}} }
	ops := func(o ...*pb.RequestOp) []*pb.RequestOp { return o }
	leases := map[int64][][]byte{1: {[]byte("write"), []byte("both")}, 2: {[]byte("write"), []byte("read")}}
	keys := func(lease int64) ([][]byte, error) { return leases[lease], nil }

	for name, c := range map[string]struct {
		txn  *pb.TxnRequest
		want bool
	}{
		"empty":                                {&pb.TxnRequest{}, true},
		"compare":                              {&pb.TxnRequest{Compare: compare("read")}, true},
		"compare of an unreadable key":         {&pb.TxnRequest{Compare: compare("write")}, false},
		"get":                                  {&pb.TxnRequest{Success: ops(get("read"), get("both"))}, true},
		"get of an unreadable key":             {&pb.TxnRequest{Success: ops(get("read"), get("write"))}, false},
		"put":                                  {&pb.TxnRequest{Failure: ops(put("write", false, 0))}, true},
		"put with PrevKv":                      {&pb.TxnRequest{Failure: ops(put("both", true, 0))}, true},
		"put with PrevKv of an unreadable key": {&pb.TxnRequest{Failure: ops(put("write", true, 0))}, false},
		"put with the lease of writable keys":  {&pb.TxnRequest{Failure: ops(put("write", false, 1))}, true},
		"put with the lease of an unwritable key": {&pb.TxnRequest{Failure: ops(put("write", false, 2))}, false},
		"put with a lease that does not exist":    {&pb.TxnRequest{Failure: ops(put("write", false, 3))}, true},
		"delete":                                  {&pb.TxnRequest{Failure: ops(del("write", false))}, true},
		"delete with PrevKv of an unreadable key": {&pb.TxnRequest{Failure: ops(del("write", true))}, false},
		"delete of an unwritable key":             {&pb.TxnRequest{Failure: ops(del("read", false))}, false},
		"nested transaction":                      {&pb.TxnRequest{Success: ops(txn(&pb.TxnRequest{Compare: compare("both"), Failure: ops(put("both", true, 1))}))}, true},
		"nested compare of an unreadable key":     {&pb.TxnRequest{Success: ops(txn(&pb.TxnRequest{Compare: compare("write")}))}, false},
		"nested put of an unwritable key":         {&pb.TxnRequest{Success: ops(txn(&pb.TxnRequest{Failure: ops(put("read", false, 0))}))}, false},
		"op without a request":                    {&pb.TxnRequest{Success: ops(&pb.RequestOp{})}, true},
	} {
		err := s.CanTxn("ann", c.txn, keys)
		require.Equal(t, c.want, err == nil, "%s: %v", name, err)
		require.NoError(t, s.CanTxn(Root, c.txn, keys), name)
		if len(c.txn.Compare)+len(c.txn.Success)+len(c.txn.Failure) > 0 && name != "op without a request" {
			require.ErrorContains(t, s.CanTxn("", c.txn, keys), "user name is empty", name)
			require.ErrorContains(t, s.CanTxn("nobody", c.txn, keys), "permission denied", name)
		}
	}
}

package users

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// TestScripts runs the scripts in testdata. The response or error of each request and the change of the auth revision
// must be as expected. The commands are:
//
//	enable, disable, status                   make that request
//	user-add user= password= [no-password]    add a user
//	user-passwd user= password=               change a user's password
//	user-passwd user= hash=                   set the bcrypt hash, in base64, of a user's password
//	user-delete, user-get user=               delete a user, or list its roles
//	user-list, role-list                      list all users or roles
//	user-grant, user-revoke user= role=       grant a role to a user, or revoke it
//	role-add, role-delete, role-get role=     add or delete a role, or list its permissions
//	role-grant role= [kind=] key= end=        grant a permission on [key, end): READ, WRITE or READWRITE
//	role-revoke role= key= end=               revoke the permission on [key, end)
//	login user= password= hold=               log in, and save the token under the name in hold
//	who token=                                show the user of a saved token
//	range, delete as= key= end= [prev]        check whether the user in as may read or delete [key, end)
//	put as= key= [prev] [lease=(KEY,...)]     check whether the user may put a key, with a lease that has these keys
//	lease-revoke, lease-see as= lease=(...)   check whether the user may revoke or see a lease that has these keys
//	admin as=                                 check whether the user has the role root
//	known as=                                 check whether there is a user
//	may-get as= user=, may-get as= role=      check whether the user in as may get a user or a role
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		w := newWorld(t)
		savedTokens := map[string]string{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			w.t = t
			before := w.state().Revision()
			out := w.run(d, savedTokens)
			if after := w.state().Revision(); after != before {
				out += fmt.Sprintf("revision %d -> %d\n", before, after)
			}
			return out
		})
	})
}

// arg returns the value of the argument name=value of a command. The empty value is written name=().
func arg(d *datadriven.TestData, name string) string {
	for _, a := range d.CmdArgs {
		if a.Key == name && len(a.Vals) > 0 {
			return strings.ReplaceAll(a.Vals[0], `\0`, "\x00")
		}
	}
	return ""
}

func (w *world) run(d *datadriven.TestData, savedTokens map[string]string) string {
	user, role, as := arg(d, "user"), arg(d, "role"), arg(d, "as")
	key, end := []byte(arg(d, "key")), []byte(arg(d, "end"))
	answer := func(err string, r ...any) string {
		if err != "" {
			return err + "\n"
		}
		return strings.TrimSpace(fmt.Sprintln(append([]any{"ok"}, r...)...)) + "\n"
	}
	checked := func(err error) string {
		if err != nil {
			return errorText(err) + "\n"
		}
		return "ok\n"
	}
	switch d.Cmd {
	case "enable":
		_, err := do(w, (*State).Enable, &pb.AuthEnableRequest{})
		return answer(err)
	case "disable":
		_, err := do(w, (*State).Disable, &pb.AuthDisableRequest{})
		return answer(err)
	case "status":
		r, err := w.state().Status(&pb.AuthStatusRequest{})
		require.NoError(w.t, err)
		return answer("", r.Enabled, r.AuthRevision)
	case "user-add":
		r := &pb.AuthUserAddRequest{Name: user, Password: arg(d, "password")}
		if d.HasArg("no-password") {
			r.Options = &authpb.UserAddOptions{NoPassword: true}
		}
		if err := HashAdd(r, MinCost); err != nil {
			return errorText(err) + "\n"
		}
		_, err := do(w, (*State).UserAdd, r)
		return answer(err)
	case "user-delete":
		_, err := do(w, (*State).UserDelete, &pb.AuthUserDeleteRequest{Name: user})
		return answer(err)
	case "user-passwd":
		r := &pb.AuthUserChangePasswordRequest{Name: user, Password: arg(d, "password"), HashedPassword: arg(d, "hash")}
		if err := HashChange(r, MinCost); err != nil {
			return errorText(err) + "\n"
		}
		_, err := do(w, (*State).UserChangePassword, r)
		return answer(err)
	case "user-get":
		r, err := w.state().UserGet(&pb.AuthUserGetRequest{Name: user})
		if err != nil {
			return errorText(err) + "\n"
		}
		return answer("", r.Roles)
	case "user-list":
		r, err := w.state().UserList(&pb.AuthUserListRequest{})
		require.NoError(w.t, err)
		return answer("", r.Users)
	case "user-grant":
		_, err := do(w, (*State).UserGrantRole, &pb.AuthUserGrantRoleRequest{User: user, Role: role})
		return answer(err)
	case "user-revoke":
		_, err := do(w, (*State).UserRevokeRole, &pb.AuthUserRevokeRoleRequest{Name: user, Role: role})
		return answer(err)
	case "role-add":
		_, err := do(w, (*State).RoleAdd, &pb.AuthRoleAddRequest{Name: role})
		return answer(err)
	case "role-delete":
		_, err := do(w, (*State).RoleDelete, &pb.AuthRoleDeleteRequest{Role: role})
		return answer(err)
	case "role-get":
		r, err := w.state().RoleGet(&pb.AuthRoleGetRequest{Role: role})
		if err != nil {
			return errorText(err) + "\n"
		}
		var perms []string
		for _, p := range r.Perm {
			perms = append(perms, fmt.Sprintf("%s[%q,%q)", p.PermType, p.Key, p.RangeEnd))
		}
		return answer("", perms)
	case "role-list":
		r, err := w.state().RoleList(&pb.AuthRoleListRequest{})
		require.NoError(w.t, err)
		return answer("", r.Roles)
	case "role-grant":
		r := &pb.AuthRoleGrantPermissionRequest{Name: role}
		if kind := arg(d, "kind"); kind != "" {
			number, known := authpb.Permission_Type_value[kind]
			if !known {
				number = 7
			}
			r.Perm = &authpb.Permission{PermType: authpb.Permission_Type(number), Key: key, RangeEnd: end}
		}
		_, err := do(w, (*State).RoleGrantPermission, r)
		return answer(err)
	case "role-revoke":
		_, err := do(w, (*State).RoleRevokePermission, &pb.AuthRoleRevokePermissionRequest{Role: role, Key: key, RangeEnd: end})
		return answer(err)
	case "login":
		r, err := w.state().Authenticate(&pb.AuthenticateRequest{Name: user, Password: arg(d, "password")}, w.tokens, w.now)
		if err != nil {
			return errorText(err) + "\n"
		}
		savedTokens[arg(d, "hold")] = r.Token
		return "ok\n"
	case "who":
		return answer("", fmt.Sprintf("%q", w.tokenUser(savedTokens[arg(d, "token")])))
	case "range":
		return checked(w.state().CanRange(as, key, end))
	case "put":
		r := &pb.PutRequest{Key: key, PrevKv: d.HasArg("prev")}
		if d.HasArg("lease") {
			r.Lease = 5
		}
		return checked(w.state().CanPutRequest(as, r, w.lease(d)))
	case "delete":
		return checked(w.state().CanDeleteRequest(as, &pb.DeleteRangeRequest{Key: key, RangeEnd: end, PrevKv: d.HasArg("prev")}))
	case "lease-revoke":
		return checked(w.state().CanWriteLease(as, 5, w.lease(d)))
	case "lease-see":
		return checked(w.state().CanReadLease(as, 5, w.lease(d)))
	case "admin":
		return checked(w.state().CanAdmin(as))
	case "known":
		return checked(w.state().MustBeAuthenticated(as))
	case "may-get":
		if user != "" {
			return checked(w.state().CanGetUser(as, &pb.AuthUserGetRequest{Name: user}))
		}
		return checked(w.state().CanGetRole(as, &pb.AuthRoleGetRequest{Role: role}))
	}
	w.t.Fatalf("unknown command %s", d.Cmd)
	return ""
}

// lease returns the keys of lease 5, which the command's argument lease=(a,b) lists.
func (w *world) lease(d *datadriven.TestData) LeaseKeys {
	return func(lease int64) ([][]byte, error) {
		require.EqualValues(w.t, 5, lease)
		var keys [][]byte
		for _, a := range d.CmdArgs {
			if a.Key == "lease" {
				for _, v := range a.Vals {
					keys = append(keys, []byte(v))
				}
			}
		}
		return keys, nil
	}
}

func TestLoadRefusesCorruptRecords(t *testing.T) {
	w := newWorld(t)
	w.enable()
	must(w, (*State).RoleAdd, &pb.AuthRoleAddRequest{Name: "r"})
	for _, name := range []string{recordSettings, prefixUser + Root, prefixRole + "r"} {
		good := w.records[name]
		for _, c := range []struct {
			value []byte
			want  error
		}{
			{nil, errCorrupt},
			{append([]byte{2}, good[1:]...), ErrUnknownFormat},
			{good[:1], errCorrupt},
		} {
			if name == prefixRole+"r" && len(c.value) == 1 {
				c.want = errCorrupt // the name is empty
			}
			w.records[name] = c.value
			_, err := Load(w.all())
			require.ErrorIs(t, err, c.want, "%s %x", name, c.value)
			require.ErrorContains(t, err, name)
		}
		w.records[name] = good
	}
	w.records[Prefix+"something/else"] = []byte{1}
	_, err := Load(w.all())
	require.ErrorIs(t, err, ErrUnknownFormat)
	delete(w.records, Prefix+"something/else")

	w.records["alarm"] = []byte("not ours")
	w.records[prefixUser+"another"] = w.records[prefixUser+Root]
	_, err = Load(w.all())
	require.ErrorIs(t, err, errCorrupt, "a record stored under another user's name")
}

func TestDecodeSettingsRefusesInvalid(t *testing.T) {
	good := settings{enabled: true, revision: 7, disabledAt: 7}
	s, err := decodeSettings(good.encode())
	require.NoError(t, err)
	require.Equal(t, good, s)
	for name, b := range map[string][]byte{
		"disabled at a later revision": settings{revision: 7, disabledAt: 8}.encode(),
		"no revision":                  settings{}.encode(),
		"trailing byte":                append(good.encode(), 0),
		"enabled is neither 0 nor 1":   {format, 2, 1, 1},
		"truncated":                    good.encode()[:3],
		"only a format byte":           {format},
	} {
		_, err := decodeSettings(b)
		require.ErrorIs(t, err, errCorrupt, name)
	}
}

func TestHashWithTooHighCostIsRefused(t *testing.T) {
	w := newWorld(t)
	w.addUser("ann", "a")
	slow := strings.Replace(unknownUserHash, "$10$", fmt.Sprintf("$%d$", MaxCost+1), 1)
	r := &pb.AuthUserChangePasswordRequest{Name: "ann", HashedPassword: base64.StdEncoding.EncodeToString([]byte(slow))}
	require.NoError(t, HashChange(r, MinCost))
	_, err := do(w, (*State).UserChangePassword, r)
	require.Equal(t, errorText(errNoPasswordUser), err)
}

func TestLoadWithoutRecords(t *testing.T) {
	s := newWorld(t).state()
	require.False(t, s.Enabled())
	require.EqualValues(t, 1, s.Revision())
	require.NoError(t, s.CanRange("", []byte("a"), []byte{0}))
	require.NoError(t, s.CanAdmin(""))
}

func TestLimitsOfNamesAndCounts(t *testing.T) {
	w := newWorld(t)
	long := strings.Repeat("n", MaxNameBytes+1)
	_, err := do(w, (*State).UserAdd, &pb.AuthUserAddRequest{Name: long})
	require.Equal(t, "InvalidArgument: etcdserver: user name of 1025 bytes, at most 1024", err)
	_, err = do(w, (*State).RoleAdd, &pb.AuthRoleAddRequest{Name: long})
	require.Equal(t, "InvalidArgument: etcdserver: role name of 1025 bytes, at most 1024", err)

	s := w.state()
	for i := range MaxRoles {
		s.roles[fmt.Sprint(i)] = &authpb.Role{}
	}
	_, _, refused := s.RoleAdd(&pb.AuthRoleAddRequest{Name: "one more"})
	require.Equal(t, "ResourceExhausted: etcdserver: there are 5000 roles already, which is the limit", errorText(refused))

	must(w, (*State).RoleAdd, &pb.AuthRoleAddRequest{Name: "r"})
	key := []byte(strings.Repeat("k", MaxRecordBytes))
	_, err = do(w, (*State).RoleGrantPermission, &pb.AuthRoleGrantPermissionRequest{Name: "r", Perm: &authpb.Permission{Key: key}})
	require.Contains(t, err, "ResourceExhausted: etcdserver: role would take")
}

func TestLeaseReadErrorIsReturned(t *testing.T) {
	w := newWorld(t)
	w.enable()
	w.addUser("ann", "a")
	broken := errors.New("broken")
	keys := func(int64) ([][]byte, error) { return nil, broken }
	require.ErrorIs(t, w.state().CanWriteLease("ann", 5, keys), broken)
	require.NoError(t, w.state().CanWriteLease(Root, 5, keys), "for root the lease's keys are not read")
}

func FuzzLoad(f *testing.F) {
	w := newWorld(&testing.T{})
	must(w, (*State).RoleAdd, &pb.AuthRoleAddRequest{Name: "r"})
	for name, value := range w.records {
		f.Add(name, value)
	}
	f.Fuzz(func(t *testing.T, name string, value []byte) {
		w := newWorld(t)
		w.records[name] = value
		s, err := Load(w.all())
		if err != nil {
			return
		}
		for _, u := range s.Users() {
			_ = s.CanRange(string(u.Name), []byte("a"), []byte{0})
		}
	})
}

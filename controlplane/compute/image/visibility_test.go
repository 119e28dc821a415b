package image

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestVisibility checks which callers may give an image which visibility, by Create and by Update.
func TestVisibility(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	url := w.write("disk.raw", noise(1000))
	for _, c := range []struct {
		name     string
		v        cloud.Visibility
		metadata map[string]string
		admin    bool
		kind     fault.Kind
		says     string
	}{
		{name: "nothing said is private"},
		{name: "private", v: cloud.Private},
		{name: "a member publishes", v: cloud.Public, kind: fault.PermissionDenied, says: "only system:admin may publish"},
		{name: "an administrator publishes", v: cloud.Public, admin: true},
		{name: "shared without orgs", v: cloud.Shared, kind: fault.InvalidArgument, says: "trivet/shared-with"},
		{name: "shared", v: cloud.Shared, metadata: map[string]string{cloud.SharedWith: "b,c"}},
		{name: "shared with an invalid org ID", v: cloud.Shared, metadata: map[string]string{cloud.SharedWith: "b, c"}, kind: fault.InvalidArgument, says: `" c" is not an org ID`},
		{name: "a reserved key", metadata: map[string]string{cloud.ImageReason: "x"}, kind: fault.InvalidArgument, says: "set by the control plane only"},
		{name: "an unknown key", metadata: map[string]string{"trivet/share-with": "b"}, kind: fault.InvalidArgument, says: "trivet/share-with is unknown"},
		{name: "no visibility at all", v: 9, kind: fault.InvalidArgument, says: "visibility"},
	} {
		t.Run(c.name, func(t *testing.T) {
			i := described(url)
			i.Visibility, i.Metadata = c.v, c.metadata
			ctx := member(t)
			if c.admin {
				ctx = admin(t)
			}
			made, err := s.Create(ctx, i, [32]byte{})
			if c.says == "" {
				require.NoError(t, err)
				return
			}
			require.True(t, fault.Is(err, c.kind), "%v", err)
			require.ErrorContains(t, err, c.says)
			require.Empty(t, made.Image.ID)
			// Update must be refused like Create.
			private, err := s.Create(member(t), described(url), [32]byte{})
			require.NoError(t, err)
			_, err = s.Update(member(t), "acme", private.Image.ID, "", c.v, c.metadata)
			require.True(t, fault.Is(err, c.kind), "%v", err)
			now, err := s.Get(t.Context(), "acme", private.Image.ID)
			require.NoError(t, err)
			require.Equal(t, private.Image, *now)
		})
	}
}

// TestVisibilityInLists checks which of a private, a shared and a public image of one org each of three orgs can list,
// read, update and delete.
func TestVisibilityInLists(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	url := w.write("disk.raw", noise(1000))
	ids := map[string]cloud.ImageID{}
	for name, i := range map[string]cloud.Image{
		"private": {Visibility: cloud.Private},
		"shared":  {Visibility: cloud.Shared, Metadata: map[string]string{cloud.SharedWith: "friend,other", "k": "v"}},
		"public":  {Visibility: cloud.Public},
	} {
		i.Name, i.Org, i.Source = name, "acme", url
		made, err := s.Create(admin(t), i, [32]byte{})
		require.NoError(t, err)
		ids[name] = made.Image.ID
	}
	for _, c := range []struct {
		org              cloud.OrgID
		sees, withPublic []string
		changes          bool
	}{
		{"acme", []string{"private", "shared", "public"}, []string{"private", "shared", "public"}, true},
		{"friend", []string{"shared"}, []string{"shared", "public"}, false},
		{"stranger", nil, []string{"public"}, false},
	} {
		for public, want := range map[bool][]string{false: c.sees, true: c.withPublic} {
			list, next, err := s.List(t.Context(), c.org, public, 0, "")
			require.NoError(t, err)
			require.Empty(t, next)
			var got []string
			for _, i := range list {
				got = append(got, i.Name)
			}
			require.ElementsMatch(t, want, got, "%s, public %v", c.org, public)
		}
		for name, id := range ids {
			seen := false
			for _, n := range c.withPublic {
				seen = seen || n == name
			}
			i, err := s.Get(t.Context(), c.org, id)
			_, changed := s.Update(as(t, c.org, "", cloud.SystemAdmin), c.org, id, "", 0, map[string]string{"x": "y"})
			switch {
			case !seen:
				require.True(t, fault.Is(err, fault.NotFound))
				require.True(t, fault.Is(changed, fault.NotFound))
				require.True(t, fault.Is(s.Delete(member(t), c.org, id, [32]byte{}), fault.NotFound))
				continue
			case c.changes:
				require.NoError(t, changed)
			default:
				deleted := s.Delete(member(t), c.org, id, [32]byte{})
				for _, err := range []error{changed, deleted} {
					require.True(t, fault.Is(err, fault.PermissionDenied), "%v", err)
					require.ErrorContains(t, err, "belongs to org acme")
				}
			}
			require.NoError(t, err)
			_, visible := toProto(i, c.org).Metadata[cloud.SharedWith]
			require.Equal(t, name == "shared" && c.org == "acme", visible, "only the owner sees with whom it is shared")
			require.Equal(t, convert.Image(i).GetChecksum(), toProto(i, c.org).GetChecksum())
		}
	}
	// A page token must be valid only for the list that returned it.
	_, next, err := s.List(t.Context(), "acme", false, 1, "")
	require.NoError(t, err)
	require.NotEmpty(t, next)
	for _, org := range []cloud.OrgID{"friend", "stranger"} {
		_, _, err = s.List(t.Context(), org, false, 1, next)
		require.True(t, fault.Is(err, fault.InvalidArgument))
	}
	_, _, err = s.List(t.Context(), "acme", true, 1, next)
	require.True(t, fault.Is(err, fault.InvalidArgument))
	for _, id := range []cloud.ImageID{"", "x", "../../etc/shadow"} {
		_, err = s.Get(t.Context(), "acme", id)
		require.True(t, fault.Is(err, fault.InvalidArgument), id)
	}
}

// TestChangePublicImage checks that a member of the image's own org can change nothing of a PUBLIC image, not even its
// visibility, and that a system:admin can.
func TestChangePublicImage(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	i := described(w.write("disk.raw", noise(1000)))
	i.Visibility = cloud.Public
	made, err := s.Create(admin(t), i, [32]byte{})
	require.NoError(t, err)
	for _, c := range []struct {
		v        cloud.Visibility
		metadata map[string]string
	}{{0, nil}, {cloud.Public, nil}, {cloud.Private, nil}, {cloud.Shared, map[string]string{cloud.SharedWith: "friend"}}} {
		_, err := s.Update(member(t), "acme", made.Image.ID, "other", c.v, c.metadata)
		require.True(t, fault.Is(err, fault.PermissionDenied), "visibility %d: %v", c.v, err)
	}
	now, err := s.Get(t.Context(), "acme", made.Image.ID)
	require.NoError(t, err)
	require.Equal(t, made.Image, *now)
	private, err := s.Update(admin(t), "acme", made.Image.ID, "", cloud.Private, nil)
	require.NoError(t, err)
	require.Equal(t, cloud.Private, private.Visibility)
	_, err = s.Update(member(t), "acme", made.Image.ID, "mine", 0, nil)
	require.NoError(t, err)
}

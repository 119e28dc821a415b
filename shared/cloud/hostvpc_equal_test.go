package cloud

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestEqualComparesAllFields changes each field of a port. It fails for a new field that Equal does not compare.
func TestEqualComparesAllFields(t *testing.T) {
	require.True(t, new(HostPort).Equal(new(HostPort)))
	for i := range reflect.TypeFor[HostPort]().NumField() {
		var p HostPort
		changeField(reflect.ValueOf(&p).Elem().Field(i))
		require.False(t, p.Equal(new(HostPort)), reflect.TypeFor[HostPort]().Field(i).Name)
	}
	require.True(t, new(RemotePort).Equal(new(RemotePort)))
	for i := range reflect.TypeFor[RemotePort]().NumField() {
		var p RemotePort
		changeField(reflect.ValueOf(&p).Elem().Field(i))
		require.False(t, p.Equal(new(RemotePort)), reflect.TypeFor[RemotePort]().Field(i).Name)
	}
}

// changeField gives a zero field another value.
func changeField(v reflect.Value) {
	switch v.Kind() {
	case reflect.Slice:
		v.Set(reflect.Append(v, reflect.Zero(v.Type().Elem())))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString("x")
	case reflect.Array: // MAC
		v.Index(0).SetUint(1)
	case reflect.Uint32:
		v.SetUint(1)
	default:
		v.Set(reflect.ValueOf(netip.MustParseAddr("192.0.2.1")))
	}
}

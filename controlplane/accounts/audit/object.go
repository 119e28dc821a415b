package audit

import (
	"slices"
	"strings"
)

// making lists the prefixes of the names of methods that create an object. If the request of such a method has a name,
// the name is that of the new object, and the IDs are those of other objects, such as the volume of a snapshot.
var making = []string{"Create", "Import", "Register", "Upload", "Begin"}

// objectName returns the name of the object that a call changes. It returns "" if the request names the object, or if
// nameOf does not know it. method is the full name of the method, target describes the request (see Record.Target), and
// nameOf returns the name of the object with an ID, or "".
//
// The object is that of the field id. Without such a field, it is the one whose kind is in the name of the method, as
// vm_id in DeleteVm, or else the first. In a REST call, it is the last object in the path.
func objectName(method, target string, nameOf func(id string) string) string {
	method = method[strings.LastIndexByte(method, '/')+1:]
	words := strings.Fields(target)
	if len(words) == 2 && strings.HasPrefix(words[1], "/") { // a REST call, such as DELETE /api/v1/vms/<ID>
		for _, part := range slices.Backward(strings.Split(words[1], "/")) {
			if name := nameOf(part); name != "" {
				return name
			}
		}
		return ""
	}
	isName := func(word string) bool { return strings.HasPrefix(word, "name=") || strings.HasPrefix(word, "id=") }
	if slices.ContainsFunc(making, func(verb string) bool { return strings.HasPrefix(method, verb) }) && slices.ContainsFunc(words, isName) {
		return ""
	}
	found := ""
	for _, word := range words {
		key, value, _ := strings.Cut(word, "=")
		name := ""
		kind, ok := strings.CutSuffix(key, "_id")
		if (ok || key == "id") && kind != "org" && kind != "project" {
			name = nameOf(value)
		}
		if name == "" {
			continue
		}
		if key == "id" || found == "" || strings.Contains(strings.ToLower(method), strings.ReplaceAll(kind, "_", "")) {
			found = name
		}
		if key == "id" {
			return found
		}
	}
	return found
}

// Checks the bodies that Headwater sends to Azure against the models of Microsoft's Go SDK.
//
//	azure-oracle BODIES
//
// BODIES has one JSON object on each line: {"kind": "Microsoft.Compute/virtualMachines", "body": {..}}. Each body is
// read into the model of its kind and written again. A field that the model does not know is lost on this way, a value of
// a wrong type is an error, and values of enumerations are compared with the model's lists. The result must equal the body.
//
// Then mistakes are made in each body, one at a time: a field is misspelt, moved into its neighbour, or has another type.
// Each mistake must be found, so that the check itself is checked.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"sort"

	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v8"
	"github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v7"
)

// The model of each kind of request.
var models = map[string]func() any{
	"Microsoft.Compute/virtualMachines":           func() any { return &armcompute.VirtualMachine{} },
	"Microsoft.Compute/virtualMachines/reimage":   func() any { return &armcompute.VirtualMachineReimageParameters{} },
	"Microsoft.Compute/disks":                     func() any { return &armcompute.Disk{} },
	"Microsoft.Compute/disks/beginGetAccess":      func() any { return &armcompute.GrantAccessData{} },
	"Microsoft.Compute/galleries":                 func() any { return &armcompute.Gallery{} },
	"Microsoft.Compute/galleries/images":          func() any { return &armcompute.GalleryImage{} },
	"Microsoft.Compute/galleries/images/versions": func() any { return &armcompute.GalleryImageVersion{} },
	"Microsoft.Network/networkInterfaces":         func() any { return &armnetwork.Interface{} },
}

// The values of enumerations.
var enumerations = map[reflect.Type]map[string]bool{}

func known[T ~string](values []T) {
	set := map[string]bool{}
	for _, value := range values {
		set[string(value)] = true
	}
	enumerations[reflect.TypeOf(*new(T))] = set
}

func init() {
	known(armcompute.PossibleAccessLevelValues())
	known(armcompute.PossibleArchitectureValues())
	known(armcompute.PossibleCachingTypesValues())
	known(armcompute.PossibleDeleteOptionsValues())
	known(armcompute.PossibleDiffDiskOptionsValues())
	known(armcompute.PossibleDiffDiskPlacementValues())
	known(armcompute.PossibleDiskCreateOptionValues())
	known(armcompute.PossibleDiskCreateOptionTypesValues())
	known(armcompute.PossibleDiskDeleteOptionTypesValues())
	known(armcompute.PossibleDiskStorageAccountTypesValues())
	known(armcompute.PossibleHostCachingValues())
	known(armcompute.PossibleHyperVGenerationValues())
	known(armcompute.PossibleOperatingSystemStateTypesValues())
	known(armcompute.PossibleOperatingSystemTypesValues())
	known(armcompute.PossibleReplicationModeValues())
	known(armcompute.PossibleSecurityTypesValues())
	known(armcompute.PossibleStorageAccountTypeValues())
	known(armcompute.PossibleStorageAccountTypesValues())
	known(armcompute.PossibleVirtualMachineEvictionPolicyTypesValues())
	known(armcompute.PossibleVirtualMachinePriorityTypesValues())
	known(armnetwork.PossibleIPAllocationMethodValues())
}

// unknownValue is the first value of an enumeration that its model does not list.
func unknownValue(value reflect.Value) string {
	switch value.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !value.IsNil() {
			return unknownValue(value.Elem())
		}
	case reflect.Struct:
		for i := range value.NumField() {
			if value.Type().Field(i).IsExported() {
				if odd := unknownValue(value.Field(i)); odd != "" {
					return odd
				}
			}
		}
	case reflect.Slice:
		for i := range value.Len() {
			if odd := unknownValue(value.Index(i)); odd != "" {
				return odd
			}
		}
	case reflect.String:
		if set, is := enumerations[value.Type()]; is && !set[value.String()] {
			return fmt.Sprintf("%s is not a %s", value.String(), value.Type())
		}
	}
	return ""
}

// check returns what is wrong with a body, or "".
func check(kind string, body any) string {
	model, is := models[kind]
	if !is {
		return "no model for this kind"
	}
	text, err := json.Marshal(body)
	if err != nil {
		return err.Error()
	}
	into := model()
	if err := json.Unmarshal(text, into); err != nil {
		return err.Error()
	}
	if odd := unknownValue(reflect.ValueOf(into)); odd != "" {
		return odd
	}
	back, err := json.Marshal(into)
	if err != nil {
		return err.Error()
	}
	var again any
	if err := json.Unmarshal(back, &again); err != nil {
		return err.Error()
	}
	if !reflect.DeepEqual(body, again) {
		return fmt.Sprintf("sent %s\nkept %s", text, back)
	}
	return ""
}

// A change of a body, and how to undo it.
type mistake struct {
	name string
	make func()
	undo func()
}

// mistakes lists the mistakes that can be made in a body. Tags may have any name.
func mistakes(path string, value any, found []mistake) []mistake {
	switch value := value.(type) {
	case map[string]any:
		if path == "/tags" {
			return found
		}
		names := make([]string, 0, len(value))
		for name := range value {
			names = append(names, name)
		}
		sort.Strings(names)
		for at, name := range names {
			field := value[name]
			found = append(found,
				mistake{path + "/" + name + " misspelt", func() { delete(value, name); value[name+"s"] = field }, func() { delete(value, name+"s"); value[name] = field }},
				mistake{path + "/" + name + " of another type", func() { value[name] = other(field) }, func() { value[name] = field }})
			if next, is := value[names[(at+1)%len(names)]].(map[string]any); is && len(names) > 1 && names[(at+1)%len(names)] != "tags" {
				if _, has := next[name]; !has {
					found = append(found, mistake{path + "/" + name + " nested", func() { delete(value, name); next[name] = field }, func() { delete(next, name); value[name] = field }})
				}
			}
			found = mistakes(path+"/"+name, field, found)
		}
	case []any:
		for at, item := range value {
			found = mistakes(fmt.Sprintf("%s/%d", path, at), item, found)
		}
	}
	return found
}

// other is a value of another type.
func other(value any) any {
	switch value.(type) {
	case string:
		return 7.0
	case float64, bool:
		return "seven"
	default:
		return true
	}
}

func main() {
	file, err := os.Open(os.Args[1])
	if err != nil {
		fail(err.Error())
	}
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	seen := map[string]bool{}
	kinds := map[string]int{}
	made := 0
	for lines.Scan() {
		if seen[lines.Text()] {
			continue
		}
		seen[lines.Text()] = true
		var request struct {
			Kind string
			Body any
		}
		if err := json.Unmarshal(lines.Bytes(), &request); err != nil {
			fail(err.Error())
		}
		if wrong := check(request.Kind, request.Body); wrong != "" {
			fail(request.Kind + ": " + wrong)
		}
		kinds[request.Kind]++
		for _, mistake := range mistakes("", request.Body, nil) {
			mistake.make()
			if check(request.Kind, request.Body) == "" {
				fail(request.Kind + ": the models accept a mistake: " + mistake.name)
			}
			mistake.undo()
			made++
		}
		if wrong := check(request.Kind, request.Body); wrong != "" {
			fail("a mistake was not undone: " + wrong)
		}
	}
	if err := lines.Err(); err != nil {
		fail(err.Error())
	}
	for kind := range models {
		if kinds[kind] == 0 {
			fail("no body of " + kind + " was sent")
		}
	}
	fmt.Printf("%d different bodies of %d kinds equal the models, and all %d mistakes are found\n", len(seen), len(kinds), made)
}

func fail(why string) {
	fmt.Fprintln(os.Stderr, "azure-oracle: "+why)
	os.Exit(1)
}

"""What ``nvidia-smi -q -x`` prints, in the structure of drivers 555 and 535; the values are made up for an H100."""

from __future__ import annotations

import stat
from pathlib import Path

UUID = "GPU-7f1c2a34-0000-4b5d-9e00-0123456789ab"

NEWER = f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <timestamp>Mon Nov 30 09:00:00 2026</timestamp>
  <driver_version>580.65.06</driver_version>
  <cuda_version>13.0</cuda_version>
  <attached_gpus>1</attached_gpus>
  <gpu id="00000000:19:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <persistence_mode>Enabled</persistence_mode>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
    <uuid>{UUID}</uuid>
    <minor_number>0</minor_number>
    <performance_state>P0</performance_state>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_applications_clocks_setting>Not Active</clocks_event_reason_applications_clocks_setting>
      <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <fb_memory_usage>
      <total>81559 MiB</total><reserved>551 MiB</reserved><used>4 MiB</used><free>81004 MiB</free>
    </fb_memory_usage>
    <compute_mode>Default</compute_mode>
    <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
    <ecc_errors>
      <volatile>
        <sram_correctable>1</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
        <dram_correctable>2</dram_correctable>
        <dram_uncorrectable>0</dram_uncorrectable>
      </volatile>
      <aggregate><sram_correctable>9</sram_correctable></aggregate>
    </ecc_errors>
    <temperature><gpu_temp>41 C</gpu_temp><gpu_temp_tlimit>46 C</gpu_temp_tlimit></temperature>
    <gpu_power_readings>
      <power_state>P0</power_state>
      <average_power_draw>70.10 W</average_power_draw>
      <instant_power_draw>71.53 W</instant_power_draw>
      <current_power_limit>700.00 W</current_power_limit>
      <default_power_limit>700.00 W</default_power_limit>
    </gpu_power_readings>
    <clocks><sm_clock>1980 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></clocks>
    <applications_clocks><graphics_clock>1980 MHz</graphics_clock><mem_clock>2619 MHz</mem_clock></applications_clocks>
    <max_clocks><sm_clock>1980 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></max_clocks>
    <processes></processes>
  </gpu>
</nvidia_smi_log>
"""

OLDER = f"""<?xml version="1.0" ?>
<nvidia_smi_log>
  <driver_version>470.57.02</driver_version>
  <cuda_version>11.4</cuda_version>
  <gpu id="00000000:3B:00.0">
    <product_name>NVIDIA A100-SXM4-40GB</product_name>
    <persistence_mode>Disabled</persistence_mode>
    <mig_mode><current_mig>Enabled</current_mig></mig_mode>
    <uuid>{UUID}</uuid>
    <minor_number>3</minor_number>
    <clocks_throttle_reasons>
      <clocks_throttle_reason_gpu_idle>Not Active</clocks_throttle_reason_gpu_idle>
      <clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>
      <clocks_throttle_reason_sw_power_cap>Active</clocks_throttle_reason_sw_power_cap>
    </clocks_throttle_reasons>
    <fb_memory_usage><total>40536 MiB</total><used>3000 MiB</used></fb_memory_usage>
    <compute_mode>Exclusive_Process</compute_mode>
    <ecc_mode><current_ecc>Disabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
    <ecc_errors>
      <volatile><single_bit><total>0</total></single_bit><double_bit><total>2</total></double_bit></volatile>
    </ecc_errors>
    <temperature><gpu_temp>[N/A]</gpu_temp></temperature>
    <power_readings>
      <power_draw>55.00 W</power_draw>
      <power_limit>300.00 W</power_limit>
      <default_power_limit>400.00 W</default_power_limit>
    </power_readings>
    <clocks><sm_clock>210 MHz</sm_clock><mem_clock>1215 MHz</mem_clock></clocks>
    <applications_clocks><graphics_clock>1095 MHz</graphics_clock><mem_clock>1215 MHz</mem_clock></applications_clocks>
    <max_clocks><sm_clock>1410 MHz</sm_clock><mem_clock>1215 MHz</mem_clock></max_clocks>
    <processes>
      <process_info><pid>7</pid><type>C</type></process_info>
      <process_info><pid>8</pid><type>G</type></process_info>
    </processes>
  </gpu>
</nvidia_smi_log>
"""


def program(folder: Path, text: str, *, status: int = 0, capability: str = "9.0") -> Path:
    """A program ``nvidia-smi`` in ``folder`` that prints ``text`` for -q -x, and a capability for --query-gpu."""
    (folder / "printed").write_text(text, encoding="utf-8")
    path = folder / "nvidia-smi"
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = "-q" ]; then\n'
        f'while IFS= read -r line || [ -n "$line" ]; do echo "$line"; done < "{folder}/printed"\n'
        f"exit {status}\nfi\n"
        f'echo "{UUID}, {capability}"\n',
        encoding="utf-8",
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
